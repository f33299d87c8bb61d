"""One rank of a training in which one rank may take only so many MiB more once its weights are there.

Arguments: that rank, and the MiB.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle

from ..adapters import load_family
from ..launch.out_of_memory import is_out_of_memory
from ..plan import Assumptions, ModelShape, uniform_plan
from ..proof.parity import Case, batch_of
from ..runtime import device
from ..runtime.engine import Engine
from ..runtime.groups import run_as_rank, start_world

MIB = 2**20
SEQ = 16
SHAPE = ModelShape("large", "llama", 2, 1024, 2048, 8, 8, 24_000, SEQ)  # 70 million weights: 1 GiB with their states


def main() -> None:
    starved, room_mib = int(sys.argv[1]), int(sys.argv[2])
    rank, ranks = start_world()
    plan = uniform_plan(
        layers=SHAPE.layers,
        world_size=ranks,
        global_train_batch_size=ranks,
        pp_deg=2 if ranks > 1 else 1,
        assumed=Assumptions(seq_length=SEQ),
    )
    case = Case(plan, SHAPE, "adamw")
    engine = Engine(plan, SHAPE, load_family(SHAPE.family), SEQ)
    filled = starve(room_mib) if rank == starved else []
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    engine.forward_backward(batch_of(case, 0))
    engine.update(optimizer, 1.0)
    filled.clear()


def starve(room_mib: int) -> list[Any]:
    """Leave no more room than this; what is returned holds the rest of a GPU's memory."""
    if device.on_gpu():
        return list(_blocks(room_mib))
    found = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    limit = int(found[1]) * 1024 + room_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return []


def _blocks(size_mib: int) -> Iterator[Any]:
    while True:
        try:
            yield paddle.empty([size_mib * MIB], "uint8")
        except Exception as error:  # Paddle has several classes for it
            if is_out_of_memory(error):
                return
            raise


if __name__ == "__main__":
    run_as_rank(main)
