"""Where a run goes on: the newest checkpoint that is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..plan import UserError
from ..runtime.engine import Engine
from .checkpoint import load, open_checkpoint, verify, whole_checkpoints
from .settings import TrainSettings


def resume(settings: TrainSettings, engine: Engine, optimizer: Any) -> int:
    """Load the checkpoint that the settings ask for; returns the steps that are done.

    `auto` takes the newest one whose files are whole, and says which are not. Raises UserError: the one named is not.
    """
    wanted = settings.resume_from_checkpoint
    if wanted == "none":
        return 0
    automatic = wanted == "auto"
    for folder in whole_checkpoints(settings.checkpoints) if automatic else [Path(wanted)]:
        checkpoint = open_checkpoint(folder, engine.shape)
        fault = ""
        try:
            verify(checkpoint, range(engine.rank, len(checkpoint.index["files"]), engine.plan.world_size))
        except UserError as error:
            if not automatic:
                raise
            fault = str(error)
            sys.stderr.write(f"warning: {fault}; the checkpoint before is taken\n")
        [faults] = engine.gather(bool(fault))
        if any(faults):
            continue
        load(checkpoint, engine, optimizer)
        return checkpoint.step
    return 0
