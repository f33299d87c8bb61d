"""One rank: trains each case with the optimizer and activations on the device and in the host's memory, saves both half
way, lets each continue from the other's checkpoint; writes down whether all are equal, and the device's memory."""

import gc
import json
import sys
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_galvatron.check.parity.parity import Case, batch_of, read_cases
from paddlenlp_galvatron.plan import Plan, Precision, Recompute
from paddlenlp_galvatron.runtime import device, gradients
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world
from paddlenlp_galvatron.runtime.paddle_private import moments_of, next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.checkpoint.loading import load
from paddlenlp_galvatron.training.checkpoint.saving import Writer
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, whole_checkpoints

PART = 999  # numbers of a part: tensors have several, of odd sizes, too
NORM = 0.1  # to which gradients are clipped
OVERFLOWS = 2.0**26  # fp16's first loss scale, with which the first step is left out
HALF, STEPS = 2, 4
PERCENTS = 100, 40, 0  # of the activations of layers in turn


def with_offload(plan: Plan) -> Plan:
    """The plan with both offloaded, as far as recompute leaves it."""
    layers = [
        replace(layer, offload=PERCENTS[index % 3] if layer.recompute in (Recompute.NONE, Recompute.FULL) else 0)
        for index, layer in enumerate(plan.layers)
    ]
    return replace(plan, layers=tuple(layers), assumed=replace(plan.assumed, offload_optimizer=True))


def train(case: Case, groups: Groups, offloaded: bool, folder: Path, source: Path | None = None) -> dict[str, Any]:
    """`source`: a folder of checkpoints to continue from; without one all steps, and a checkpoint half way."""
    gc.collect()
    empty = device.allocated_mib()
    plan = with_offload(case.plan) if offloaded else case.plan
    scale = OVERFLOWS if plan.assumed.mixed_precision is Precision.FP16 else 1.0
    engine = Engine(ModelSetup.of(plan, case.shape, case.seq_length, adapters=case.adapters), groups, scale)
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    if source:
        load(open_checkpoint(whole_checkpoints(source)[0], case.shape), engine, optimizer)
    held_mib = device.allocated_mib() - empty
    numbers = []
    while engine.steps_done < STEPS:
        numbers.append(engine.forward_backward(batch_of(case, engine.steps_done)))
        numbers.append(engine.update(optimizer, NORM))
        next_rate(optimizer)
        if engine.steps_done == HALF and not source:
            (writer := Writer(folder, engine, keep=1)).save(optimizer)
            writer.finish()
    engine.wait_for_updates()
    states = [each for tensor in engine.tensors for each in (tensor, *moments_of(optimizer, tensor))]
    weights = [tensor for unit in engine.stage.units for _, tensor in unit.held()]
    return {
        "numbers": numbers,
        "states": [device.to_host(each) for each in (*states, *weights)],
        "held_mib": held_mib,
        "activations_mib": engine.stage.window.host_mib,
        "host_mib": sum(each.size * 4 for each in states if not device.on_device(each)) / device.MIB,
    }


def same(one: dict[str, Any], other: dict[str, Any], count: int) -> bool:
    """Whether the last numbers and all states are equal, bit for bit."""
    equal = all(np.array_equal(*pair) for pair in zip(one["states"], other["states"], strict=True))
    return equal and np.array_equal(one["numbers"][-count:], other["numbers"][-count:], equal_nan=True)


def main() -> None:
    folder, groups = Path(sys.argv[1]), Groups(start_world()[0])
    gradients.PART = PART
    for index, case in enumerate(read_cases(folder)):
        saved = [folder / f"{index}.{name}" for name in ("plain", "offloaded")]
        plain, offloaded = (train(case, groups, bool(kind), saved[kind]) for kind in range(2))
        equal = [same(plain, offloaded, 2 * STEPS)]
        if index == 0:
            kinds = (False, 0), (True, 0), (False, 1)  # offloaded now, and when it was saved
            own, *others = (train(case, groups, now, folder, saved[then]) for now, then in kinds)
            equal += [same(own, other, 2 * HALF) for other in others]
        report = {"equal": equal, "left_out": sum(not isfinite(number) for number in offloaded["numbers"])}
        report |= {"moved_mib": plain["held_mib"] - offloaded["held_mib"], "host_mib": offloaded["host_mib"]}
        report["activations_mib"] = offloaded["activations_mib"]
        (folder / f"{index}.{groups.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run_as_rank(main)
