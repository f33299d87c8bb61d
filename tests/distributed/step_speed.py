"""The runtime's speed against PaddleNLP's own Trainer with fleet: uniform plans on 4 CPU processes.

    python tests/distributed/step_speed.py [PLAN]...

A plan's line has the ratio ours / theirs (below 1 we are faster) of a step's time: the median over the pairs of
neighbouring steps after the warm-up; its lowest and highest round of STEPS pairs; the same ratio of processor time
summed over the ranks, which other programs disturb less; and the largest difference between the two sides' losses, as
proof that both did the same work. `benchmarks/runtime_worker.py` says how the two take turns.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Plan, plan_to_dict
from paddlenlp_galvatron.training.recipe import Recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"  # of the ranks' program
MODEL = ModelShape("benchmark", "llama", 4, 512, 1376, 8, 8, 4096, 128)  # 17 million parameters
RECIPE = Recipe(learning_rate=3e-4, weight_decay=0.01, lr_scheduler_type="constant")
WARM_UP = 2  # steps: the first allocate, and make AdamW's moments
STEPS, ROUNDS = 5, 3
TIMEOUT_S = 300


def plan(ranks: int, tp: int = 1, pp: int = 1, micro_batches: int = 1, sp: bool = False, **options: Any) -> Plan:
    assumed = Assumptions(sequence_parallel=sp, seq_length=MODEL.max_position_embeddings)
    degrees = {"global_tp_deg": tp, "vocab_tp": tp, "pp_deg": pp, "chunks": micro_batches}
    options = degrees | options
    return uniform_plan(layers=MODEL.layers, world_size=ranks, global_train_batch_size=8, assumed=assumed, **options)


PLANS = {
    "dp4": plan(4),
    "tp4": plan(4, tp=4),
    "tp4-sp": plan(4, tp=4, sp=True),
    "tp2-dp2": plan(4, tp=2, micro_batches=2),
    "tp2-dp2-sp": plan(4, tp=2, micro_batches=2, sp=True),
    "pp2-tp2": plan(4, tp=2, pp=2, micro_batches=4),
    "pp2-tp2-sp": plan(4, tp=2, pp=2, micro_batches=4, sp=True),
    "pp4": plan(4, pp=4, micro_batches=4),
}
RECOMPUTED = plan(2, tp=2, global_checkpoint=True).layers[:2]
FURTHER = {  # only when named
    "recompute": replace(plan(2, tp=2), layers=RECOMPUTED + plan(2, tp=2).layers[2:]),
    "ulysses": plan(2, tp=2, use_ulysses=True),
    "zero2": plan(2, micro_batches=2, default_dp_type="zero2"),
}


def compare(name: str, steps: int = STEPS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Run one plan and PaddleNLP's in a launch of their own."""
    compared = (PLANS | FURTHER)[name]
    job = {"plan": plan_to_dict(compared), "shape": asdict(MODEL), "recipe": RECIPE.model_dump()}
    with tempfile.TemporaryDirectory(prefix="galvatron-benchmark-") as logs:
        request, answer = Path(logs, "job.json"), Path(logs, "result.json")
        request.write_text(json.dumps(job | {"steps": WARM_UP + steps * rounds}))
        launch("runtime_worker", [str(request), str(answer)], compared.world_size, Path(logs), TIMEOUT_S)
        result = json.loads(answer.read_text())
    ours, other = result["ours"], result["other"]
    pairs, cpu = (list(zip(ours[key], other[key], strict=True))[WARM_UP:] for key in ("steps_ms", "cpu_ms"))
    parts = [ratio(pairs[start : start + steps]) for start in range(0, len(pairs), steps)]
    return {
        "plan": name,
        "ratio": ratio(pairs),
        "rounds": [min(parts), max(parts)],
        "cpu_ratio": ratio(cpu),
        "ours_ms": median(ours_ms for ours_ms, _ in pairs),
        "max_loss_diff": max(abs(a - b) for a, b in zip(ours["losses"], other["losses"], strict=True)),
    }


def ratio(pairs: list[tuple[float, float]]) -> float:
    return median(ours / other for ours, other in pairs)


if __name__ == "__main__":
    # The ranks import their module from here, wherever they are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(BENCHMARKS)]))
    for name in sys.argv[1:] or PLANS:
        sys.stdout.write(json.dumps(compare(name)) + "\n")
        sys.stdout.flush()
