"""One rank of a training in which the rank that is told has next to no memory left once its weights are there."""

from __future__ import annotations

import re
import resource
import sys
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
BLOCK_MIB = 64  # of what a GPU is filled with: as much may be left
ROOM_MIB = 100  # that a process on CPU may take beside its weights
SEQ = 16
SHAPE = ModelShape("large", "llama", 2, 1024, 2048, 8, 8, 24_000, SEQ)  # 70 million weights: 1 GiB with their states


def main() -> None:
    starved = int(sys.argv[1])
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
    filled = starve() if rank == starved else []
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    engine.forward_backward(batch_of(case, 0))
    engine.update(optimizer, 1.0)
    filled.clear()


def starve() -> list[Any]:
    """Leave no room; what is returned holds it."""
    if device.on_gpu():
        return list(_blocks())
    found = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    limit = int(found[1]) * 1024 + ROOM_MIB * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return []


def _blocks() -> Any:
    while True:
        try:
            yield paddle.empty([BLOCK_MIB * MIB], "uint8")
        except Exception as error:  # Paddle has several classes for it
            if is_out_of_memory(error):
                return
            raise


if __name__ == "__main__":
    run_as_rank(main)
