"""One rank of a training that is interrupted (`resume`), traced (`trace`) or runs out of memory (`starve`)."""

from __future__ import annotations

import itertools
import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle

from ...launch.out_of_memory import is_out_of_memory
from ...plan import Assumptions, ModelShape, uniform_plan
from ...runtime import device
from ...runtime.adapters import load_family
from ...runtime.engine import Engine
from ...runtime.groups import run_as_rank, start_world
from ...runtime.trace import traced
from ...training.settings import read_settings
from ...training.trainer import GalvatronTrainer
from ..parity.parity import Case, batch_of
from .faults import HALVES, LATER, PASSES, STRAIGHT

MIB = 2**20
SEQ = 16
SHAPE = ModelShape("large", "llama", 2, 1024, 2048, 8, 8, 24_000, SEQ)  # 70 million weights: 1 GiB with their states


class Training:
    """Steps of two stages, where there are two ranks, on random tokens."""

    def __init__(self, micro_batches: int):
        self.rank, ranks = start_world()
        plan = uniform_plan(
            layers=SHAPE.layers,
            world_size=ranks,
            global_train_batch_size=micro_batches * ranks,
            chunks=micro_batches,
            pp_deg=2 if ranks > 1 else 1,
            assumed=Assumptions(seq_length=SEQ),
        )
        self.case = Case(plan, SHAPE, "adamw")
        self.engine = Engine(plan, SHAPE, load_family(SHAPE.family), SEQ)
        self._optimizer: Any = None

    def step(self) -> None:
        if self._optimizer is None:
            self._optimizer = self.case.recipe.build(self.engine.tensors, self.engine.decaying)
        self.engine.forward_backward(batch_of(self.case, 0))
        self.engine.update(self._optimizer, 1.0)


def starve(rank: int, room_mib: int, step: int) -> None:
    """Train until one rank runs out of memory in this step: it may take only so many MiB more, in the first step once
    its weights are there, in a later one whatever it took before."""
    training = Training(1 if step == 1 else PASSES)
    for _ in range(step - 1):
        training.step()
    filled = []
    if training.rank == rank:
        filled = _leave(room_mib)
        if step > 1:
            filled += _blocks(room_mib)  # blocks that the allocator kept from earlier steps
            _need_more(training.engine.stage, 2 * room_mib)
    training.step()
    filled.clear()


def _need_more(stage: Any, mib: int) -> None:
    """Let the second pass forward need so much more, beside the receive of the next one."""
    forward, passes = stage.forward, itertools.count(1)

    def larger(*arguments: Any) -> Any:
        more = paddle.empty([mib * MIB], "uint8") if next(passes) == 2 else None
        out = forward(*arguments)
        del more
        return out

    stage.forward = larger


def _leave(room_mib: int) -> list[Any]:
    """Leave no more memory than this; the returned tensor holds the rest of a GPU's memory."""
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


def resume(settings_file: str) -> None:
    """Train straight to the end, and half the way and on from the checkpoint, in folders of their own."""
    settings = read_settings(settings_file)
    whole = settings.max_steps
    for name, steps in ((STRAIGHT, whole), (HALVES, whole // 2), (HALVES, whole)):
        changed = {"output_dir": settings.output_dir / name, "max_steps": steps}
        GalvatronTrainer(settings.model_copy(update=changed)).train()


def trace(folder: str) -> None:
    """Trace a later step of a pipeline, and write down its events."""
    training, events = Training(PASSES), list[dict[str, Any]]()
    for _ in range(LATER - 1):
        training.step()
    with traced(training.rank, events):
        training.step()
    (Path(folder) / f"events.{training.rank}.json").write_text(json.dumps(events))


def main() -> None:
    work, *words = sys.argv[1:]
    if work == "resume":
        resume(*words)
    elif work == "trace":
        trace(*words)
    else:
        starve(*map(int, words))


if __name__ == "__main__":
    run_as_rank(main)
