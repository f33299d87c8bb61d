"""The part that looks for memory that a later step takes from a GPU, or gives back: either waits for the whole device.

Run as a program it is one rank of the training that is looked at. Other waits for the device are shown by NVIDIA's
profiler alone (docs/dev/gpus.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paddle

from ...base.units import MIB
from ...runtime import device
from ...runtime.engine import Engine
from ...runtime.groups import run_as_rank, start_world
from ...runtime.setup import ModelSetup
from ..findings import Finding
from ..parity.parity import batch_of
from .parity import waiting_cases
from .setting import Setting

SETTLED, LOOKED_AT = 2, 4  # steps: after the second, no more memory should be taken


def waits(setting: Setting) -> Iterator[Finding]:
    """Memory that Paddle's allocator has of the device, before and after some steps, and its peak in between."""
    if not setting.on_gpus:
        yield setting.skipped("memory that a later step takes", "on CPUs nothing waits for it")
        return
    names = [named.name for named in waiting_cases(setting.ranks)]
    setting.launch(f"{__package__}.waits", setting.folder, setting.ranks)
    for name, *rows in zip(names, *setting.results(), strict=True):
        moved = max(max(row) - min(row) for row in rows)
        yield setting.found(name, moved == 0, f"{moved / MIB:.1f} MiB taken or given back after step {SETTLED}")


def main() -> None:
    folder, rounds = Path(sys.argv[1]), []
    rank, _ = start_world()
    for named in waiting_cases(int(sys.argv[2])):
        case = replace(named.case, steps=SETTLED + LOOKED_AT)
        engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length))
        optimizer = case.recipe.build(engine.tensors, engine.decaying)
        for step in range(case.steps):
            if step == SETTLED:
                paddle.device.cuda.reset_max_memory_reserved()
                reserved = [device.reserved_mib()]
            engine.forward_backward(batch_of(case, step))
            engine.update(optimizer, 1.0)
        rounds.append([round(MIB * mib) for mib in (*reserved, device.reserved_mib(), device.reserved_peak_mib())])
        device.release()
    (folder / f"{rank}.json").write_text(json.dumps(rounds))


if __name__ == "__main__":
    run_as_rank(main)
