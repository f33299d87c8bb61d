"""One rank of a training whose model does not fit: the rank that is told may take so many MiB more, and no more."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from paddlenlp_galvatron.adapters import load_family
from paddlenlp_galvatron.data.source import RandomData
from paddlenlp_galvatron.plan import Assumptions, ModelShape, uniform_plan
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.training.recipe import Recipe

MIB = 2**20
SHAPE = ModelShape("large", "llama", 2, 1024, 2048, 8, 8, 24_000, 16)  # 70 million weights: 1 GiB with their states


def main() -> None:
    starved, room_mib = int(sys.argv[1]), int(sys.argv[2])
    assumed = Assumptions(seq_length=16)
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=2, pp_deg=2, chunks=2, assumed=assumed)
    engine = Engine(plan, SHAPE, load_family("llama"), 16)
    if engine.rank == starved:
        allow(room_mib)
    optimizer = Recipe().build(engine.tensors, engine.decaying)
    engine.forward_backward(RandomData(SHAPE.vocab_size, 16, plan.global_batch, 0).batch(0))
    engine.update(optimizer, 1.0)


def allow(room_mib: int) -> None:
    """Let this process take so many MiB more of memory."""
    found = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    limit = int(found[1]) * 1024 + room_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    run_as_rank(main)
