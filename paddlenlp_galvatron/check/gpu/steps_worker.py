"""One rank: trains every case a few steps and writes their ms, MiB and bytes by collective."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from statistics import median

from ...runtime import device
from ...runtime.adapters import load_family
from ...runtime.collectives import forget_traffic, traffic_bytes
from ...runtime.engine import Engine
from ...runtime.groups import Groups, run_as_rank, start_world
from ...runtime.paddle_private import next_rate
from ..parity.parity import Case, batch_of, read_cases

WARM_UP = 2  # steps: the first ones allocate, and make the optimizer's moments


def run_case(case: Case, groups: Groups, idle_mib: float | None) -> dict[str, object]:
    """Times of this rank's steps, without the first ones. `idle_mib`: memory that others had on its GPU."""
    gc.collect()
    device.release()
    before = device.allocated_mib()
    engine = Engine(case.plan, case.shape, load_family(case.shape.family), case.seq_length, groups=groups)
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    batch, steps_ms = batch_of(case, 0), []
    for _ in range(WARM_UP + case.steps):
        forget_traffic()
        device.reset_peak()
        start = time.perf_counter()
        engine.forward_backward(batch)
        engine.update(optimizer, case.recipe.max_grad_norm)
        next_rate(optimizer)
        device.synchronize()
        steps_ms.append(1000 * (time.perf_counter() - start))
    beside = device.beside_mib()
    return {
        "step_ms": median(steps_ms[WARM_UP:]),
        "allocated_mib": device.peak_mib() - before,
        "reserved_mib": device.reserved_peak_mib(),
        "beside_mib": None if beside is None or idle_mib is None else beside - idle_mib,
        "communicators": len(groups.members) + 1,  # including the world's
        "bytes": dict(traffic_bytes),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    idle_mib = device.beside_mib()
    rank, _ = start_world()
    groups = Groups(rank)
    for index, case in enumerate(read_cases(folder)):
        (folder / f"{index}.{rank}.json").write_text(json.dumps(run_case(case, groups, idle_mib)))


if __name__ == "__main__":
    run_as_rank(main)
