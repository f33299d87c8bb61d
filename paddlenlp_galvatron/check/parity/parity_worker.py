"""One rank of a parity check: trains every case under its plan and writes down losses and gradients."""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...model.lora import is_factor
from ...plan.communicators import stage_groups
from ...runtime.engine import MTP_LOSS, Engine
from ...runtime.groups import Groups, run_as_rank, start_world
from ...runtime.paddle_private import next_rate
from ...runtime.setup import MTP_WEIGHT, ModelSetup
from ...runtime.units import Trainable
from .case_weights import CaseWeights
from .parity import Case, batch_of, read_cases

LOSS_SCALE = 2.0**7  # low enough that no step overflows fp16: a skipped step would not agree with one process


def run_case(case: Case, folder: Path, index: int, groups: Groups | None = None) -> None:
    """Train a case and write `<index>.<rank>.json` and `.npz` to the folder. `groups`: communicators of earlier cases,
    reused."""
    start = time.monotonic()
    engine = Engine(
        ModelSetup.of(
            case.plan,
            case.shape,
            case.seq_length,
            seed=case.seed,
            source=CaseWeights(case.seed, case.shape.initializer_range),
            packed=case.packed,
            adapters=case.adapters,
            preference=case.preference,
        ),
        loss_scale=LOSS_SCALE,
        groups=groups,
    )
    wanted = stage_groups(case.plan, case.shape, case.seq_length, bool(case.lora_rank))
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    losses, arrays, evaluated = [], {}, 0.0
    answers = engine.answers(batch_of(case, 0)).tolist() if case.loss else []
    for step in range(case.steps):
        batch = batch_of(case, step)
        if step == case.steps - 1:
            evaluated = _whole(engine, engine.evaluate(batch))
        losses.append(_whole(engine, engine.forward_backward(batch)))
        if case.adapters:
            _require_frozen(engine)
        if step < case.compared_steps:
            for key, trainable in enumerate(engine.trainables):
                arrays[f"{step}.{key}"] = trainable.gradient.astype("float32").numpy() / engine.gradient_scale
        engine.update(optimizer, case.recipe.max_grad_norm)
        next_rate(optimizer)
    engine.wait_for_updates()
    np.savez(folder / f"{index}.{engine.rank}.npz", **arrays)
    report = {
        "losses": losses,
        "answers": answers,  # the base model's, in the first step
        "evaluated": evaluated,  # the last loss again, by a forward pass only
        "groups": sum(engine.rank in ranks for ranks, _ in wanted),
        "seconds": time.monotonic() - start,
        "pieces": {key: _describe(trainable) for key, trainable in enumerate(engine.trainables)},
    }
    (folder / f"{index}.{engine.rank}.json").write_text(json.dumps(report))


def _whole(engine: Engine, loss: float) -> float:
    """The last loss, with the balance and MTP losses."""
    loss += MTP_WEIGHT * engine.metrics.get(MTP_LOSS, 0.0)
    return loss + engine.shape.router_aux_loss_coef * engine.metrics.get("aux_loss", 0.0)


def _require_frozen(engine: Engine) -> None:
    """Raise AssertionError where a weight that does not learn has a gradient."""
    every = [weight for unit in engine.stage.units for weight in unit.weights] + engine.stage.frozen
    frozen = [weight for weight in every if not (is_factor(weight.name) or weight.state)]
    wrong = [weight.name for weight in frozen if weight.gradient is not None or not weight.tensor.stop_gradient]
    assert frozen and not wrong, wrong


def _describe(trainable: Trainable) -> list[dict[str, Any]]:
    return [
        {"weight": p.weight.name, "slice": asdict(p.weight.slice), "start": p.start, "stop": p.stop, "offset": p.offset}
        for p in trainable.pieces
    ]


def main() -> None:
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # before CUDA starts: no TF32 in fp32 products
    folder, first = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rank, _ = start_world()
    groups = Groups(rank)
    for index, case in enumerate(read_cases(folder)):
        if index >= first:
            run_case(case, folder, index, groups)


if __name__ == "__main__":
    run_as_rank(main)
