"""The runtime's speed against PaddleNLP's own Trainer with fleet: uniform plans on 4 CPU processes.

    python benchmarks/runtime.py [--plan tp4]...

Both sides train the same Llama from the same weights on the same batches, in fp32 with AdamW and clipping, in the same
processes, and take turns step by step; a step is timed between two barriers, on rank 0. The ratio is the median of
ours / theirs over the pairs of steps after the warm-up: below 1 we are faster. Next to it are the lowest and highest
round of `--steps` pairs, the same ratio of processor time summed over the ranks (which other programs on the machine
disturb less), and how far the two sides' losses lie apart at most: as proof that both did the same work.

PaddleNLP's Trainer does not run on CPU by itself. `runtime_stock.py` replaces the features that gloo lacks for it, by
the same transport that our runtime uses; a plan that it cannot run even so is named with the error. `--profile` leaves
a profile of every rank's Python in the logs and prints rank 0's; its times are not comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.base.printing import Console, table
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Plan, plan_to_dict, uniform_plan
from paddlenlp_galvatron.training.recipe import Recipe

MODEL = ModelShape("benchmark", "llama", 4, 512, 1376, 8, 8, 4096, 128)  # 17 million parameters
SEQ_LENGTH = 128
GLOBAL_BATCH = 8
WARM_UP = 2  # steps: the first allocate, and make AdamW's moments
TIMEOUT_S = 300


def plan(
    world_size: int, tp: int = 1, pp: int = 1, micro_batches: int = 1, *, sequence_parallel: bool = False, **rest: Any
) -> Plan:
    """`rest`: further options of GLOBAL mode."""
    return uniform_plan(
        layers=MODEL.layers,
        world_size=world_size,
        global_train_batch_size=GLOBAL_BATCH,
        pp_deg=pp,
        global_tp_deg=tp,
        vocab_tp=tp,
        chunks=micro_batches,
        assumed=Assumptions(sequence_parallel=sequence_parallel, seq_length=SEQ_LENGTH),
        **rest,
    )


STOCK = {
    "dp4": plan(4),
    "tp4": plan(4, tp=4),
    "tp4-sp": plan(4, tp=4, sequence_parallel=True),
    "tp2-dp2": plan(4, tp=2, micro_batches=2),
    "tp2-dp2-sp": plan(4, tp=2, micro_batches=2, sequence_parallel=True),
    "pp2-tp2": plan(4, tp=2, pp=2, micro_batches=4),
    "pp2-tp2-sp": plan(4, tp=2, pp=2, micro_batches=4, sequence_parallel=True),
    "pp4": plan(4, pp=4, micro_batches=4),
}
FURTHER = {  # compared with PaddleNLP when they are named
    "recompute": replace(
        plan(2, tp=2), layers=plan(2, tp=2, global_checkpoint=True).layers[:2] + plan(2, tp=2).layers[2:]
    ),
    "ulysses": plan(2, tp=2, use_ulysses=True),
    "zero2": plan(2, micro_batches=2, default_dp_type="zero2"),
}
# Ours / theirs when nothing was done for GPUs yet, on a quiet machine of two cores: no step may get slower.
BEFORE = {
    "dp4": 0.96,
    "tp4": 0.94,
    "tp4-sp": 0.82,
    "tp2-dp2": 0.94,
    "tp2-dp2-sp": 0.91,
    "pp2-tp2": 0.93,
    "pp2-tp2-sp": 0.89,
}


@dataclass(frozen=True)
class Comparison:
    """One plan against the other side. Times are medians; ratios are ours / theirs."""

    plan: str
    ours_ms: float = 0.0
    other_ms: float = 0.0
    ratio: float = 0.0
    round_ratios: tuple[float, ...] = ()
    cpu_ratio: float = 0.0
    max_loss_diff: float = 0.0
    error: str | None = None


def compare(name: str, of: Plan, options: argparse.Namespace, logs: Path) -> Comparison:
    """Run one plan and the other side in a launch of their own."""
    steps = options.steps
    folder = logs / name
    folder.mkdir(parents=True)
    job = {
        "plan": plan_to_dict(of),
        "shape": asdict(MODEL),
        "recipe": Recipe(learning_rate=3e-4, weight_decay=0.01, lr_scheduler_type="constant").model_dump(),
        "steps": WARM_UP + steps * options.rounds,
        "profile": options.profile,
    }
    (folder / "job.json").write_text(json.dumps(job))
    arguments = [str(folder / "job.json"), str(folder / "result.json")]
    try:
        launch("runtime_worker", arguments, of.world_size, folder, TIMEOUT_S)
    except GalvatronError as error:
        return Comparison(name, error=str(error))
    result = json.loads((folder / "result.json").read_text())
    ours, other = result["ours"], result["other"]
    pairs = list(zip(ours["steps_ms"], other["steps_ms"], strict=True))[WARM_UP:]
    differences = [abs(a - b) for a, b in zip(ours["losses"], other["losses"], strict=True)]
    return Comparison(
        name,
        median(ours_ms for ours_ms, _ in pairs),
        median(other_ms for _, other_ms in pairs),
        ratio(pairs),
        tuple(ratio(pairs[start : start + steps]) for start in range(0, len(pairs), steps)),
        ratio(list(zip(ours["cpu_ms"], other["cpu_ms"], strict=True))[WARM_UP:]),
        max(differences),
    )


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Median of ours / theirs over steps that followed one another: a machine that slows down meets both."""
    return median(ours / other for ours, other in pairs)


def shown(rows: list[Comparison]) -> Table:
    title = f"a training step, ours and PaddleNLP's, {MODEL.parameters / 1e6:.0f} M parameters"
    result = table("plan", "ours ms", "their ms", "ratio", "before", "rounds", "CPU ratio", "loss diff", title=title)
    for row in rows:
        if row.error:
            result.add_row(row.plan, "", "", "no run", "", "", "", "")
            continue
        result.add_row(
            row.plan,
            f"{row.ours_ms:.0f}",
            f"{row.other_ms:.0f}",
            f"{row.ratio:.3f}",
            f"{BEFORE[row.plan]:.2f}" if row.plan in BEFORE else "",
            f"{min(row.round_ratios):.3f}-{max(row.round_ratios):.3f}",
            f"{row.cpu_ratio:.3f}",
            f"{row.max_loss_diff:.0e}",
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plans = STOCK | FURTHER
    parser.add_argument("--plan", action="append", help=f"this one alone; may be repeated: {', '.join(plans)}")
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--profile", action="store_true", help="print a profile of rank 0")
    arguments = parser.parse_args()
    wanted = arguments.plan or list(STOCK)
    if unknown := set(wanted) - set(plans):
        parser.error(f"--plan {unknown.pop()}: choose from {', '.join(plans)}")
    # The ranks import their module from here, wherever they are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    rows: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="galvatron-benchmark-") as folder:
        for name in wanted:
            rows.append(compare(name, plans[name], arguments, Path(folder)))
            print(rows[-1], file=sys.stderr)  # minutes pass until the table
            if arguments.profile and not rows[-1].error:
                log = (Path(folder) / name / "workerlog.0").read_text()
                print(log[log.index("==== ours") :])
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(shown(rows))
        for row in rows:
            if row.error:
                print(f"{row.plan}: {row.error}")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
