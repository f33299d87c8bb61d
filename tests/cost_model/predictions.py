"""Predictions of 1,060 random plans, under cost models of every kind: `predictions.json` has the values.

python tests/cost_model/predictions.py    # writes it again; the differences show what a change of prices does
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from cost_examples import MODEL, NARROW, WIDE, example, two_types

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import CostModel, CostOptions, Task, derive
from paddlenlp_galvatron.model.layer import PARTLY
from paddlenlp_galvatron.plan import Recompute, Schedule, load_model
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.precision import Precision
from paddlenlp_galvatron.plan.strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy
from paddlenlp_galvatron.profiles.analytic import ONE_BY_ONE
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

FILE = Path(__file__).with_name("predictions.json")
COUNT, WITH_EXPERTS = 1000, 60  # plans of dense models, and of models with experts
NODES, DEVICES, LAYERS = 2, 4, 6
RESERVE_MIB = 100.0
ASSUMED = Assumptions(sequence_parallel=True, mixed_precision=Precision.BF16, seq_length=4096)


def derived(model: str, sheet: int, options: CostOptions = CostOptions(), **assumed: Any) -> CostModel:
    cut = replace(load_model(model), layers=LAYERS)
    named = load_data_sheet(("h100-80gb", "a100-80gb")[sheet])
    return derive(cut, named, NODES, DEVICES, replace(ASSUMED, **assumed), options)


@cache
def cost_models() -> list[CostModel]:
    """From files as Galvatron's and from data sheets, of all tasks and assumptions that change prices."""
    shape = replace(MODEL, layers=LAYERS)
    lora, packed = (CostOptions(task=task) for task in (Task(adapter_rank=16), Task(document_tokens=300)))
    return [
        example(model=shape),
        example(model=shape, options=CostOptions(context_mib=RESERVE_MIB), sequence_parallel=False),
        two_types((NARROW, replace(WIDE, layers=LAYERS - NARROW.layers))),
        derived("qwen2.5-0.5b", 0),
        derived("llama2-7b", 0),
        derived("llama2-7b", 1, sequence_parallel=False, async_grad_reduce=False),
        derived("llama3-8b", 0, flash_attention=False, fp32_gradients=True),
        derived("qwen2.5-7b", 1, mixed_precision=Precision.FP32),
        derived("llama2-7b", 0, lora),
        derived("llama2-7b", 0, packed),
    ]


@cache
def with_experts() -> list[CostModel]:
    return [
        derived("qwen1.5-moe-a2.7b", 0),
        derived("mixtral-8x7b", 1, CostOptions(imbalance=1.5, imbalance_bound=3, kernels=ONE_BY_ONE)),
        derived("qwen3-30b-a3b", 0, sequence_parallel=False, async_grad_reduce=False),
    ]


def drawn() -> Iterator[tuple[CostModel, Plan]]:
    """The same plans every time."""
    draw = random.Random(0)
    for number in range(COUNT + WITH_EXPERTS):
        several = cost_models() if number < COUNT else with_experts()
        cost = several[number % len(several)]
        while find_faults(plan := _plan(draw, cost), replace(cost.models[0], layers=LAYERS)):
            pass
        yield cost, plan


def _plan(draw: random.Random, cost: CostModel) -> Plan:
    stages = draw.choice((1, 2, 2, 4))
    schedule = draw.choice([*Schedule])
    chunks = draw.choice((1, 2, 3)) if 1 < stages <= LAYERS // 2 and schedule.of_chunks else 1
    chunks = min(chunks, LAYERS // stages)
    cuts = sorted(draw.sample(range(1, LAYERS), stages * chunks - 1))
    size = NODES * DEVICES // stages
    default = draw.choice([*DataParallel])

    def degrees() -> dict[str, int]:
        degree = draw.choice([d for d in (1, 2, 4, 8) if size % d == 0])
        return {"degree": degree, "context": draw.choice([d for d in (1, 1, 2, 4) if size % (degree * d) == 0])}

    def experts() -> dict[str, Any]:
        split = {name: draw.choice([d for d in (1, 2, 4, 8) if size % d == 0]) for name in ("ep", "etp")}
        return {**split, "experts_dp_type": draw.choice((None, default, DataParallel.ZERO3))}

    def layer() -> LayerStrategy:
        return LayerStrategy(
            **degrees(),
            ulysses=draw.random() < 0.3,
            consecutive=draw.random() < 0.8,
            dp_type=draw.choice((default, DataParallel.ZERO3)),
            recompute=draw.choice((Recompute.NONE, Recompute.NONE, Recompute.FULL, *PARTLY)),
            **(experts() if cost.models[0].experts else {}),
        )

    few = [layer() for _ in range(draw.choice((1, 2, 3)))]
    micro_batches = draw.choice((1, 2, 3, 8))
    return Plan(
        world_size=NODES * DEVICES,
        global_batch=micro_batches * size * draw.choice((1, 2)),
        micro_batches=micro_batches,
        stages=tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, LAYERS], strict=True)),
        layers=tuple(draw.choice(few) for _ in range(LAYERS)),
        vocab=VocabStrategy(**degrees(), dp_type=draw.choice((default, DataParallel.ZERO3))),
        schedule=schedule,
        chunks=chunks,
        default_dp_type=default,
        assumed=cost.assumed,
    )


def predicted(cost: CostModel, plan: Plan) -> list[float] | str:
    """Step time in ms, and of each stage the bound and the estimate of its memory in MiB; or why there is no price."""
    try:
        prediction = cost.predict(plan)
    except UserError as error:
        return str(error)
    memory = (stage.memory for stage in prediction.stages)
    return [prediction.time_s * 1e3, *(mib for each in memory for mib in (each.total_mib, each.tensors_mib))]


def main() -> None:
    """Write the file again."""
    rows = [json.dumps(predicted(*case)) for case in drawn()]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
