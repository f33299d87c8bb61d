"""Where a run goes on: the newest checkpoint that is whole, and the sample after those that it was trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..plan import UserError
from ..runtime.engine import Engine
from .checkpoint import (
    BrokenCheckpoint,
    Checkpoint,
    gather_objects,
    load,
    open_checkpoint,
    verify,
    whole_checkpoints,
)
from .data import BatchSource
from .settings import TrainSettings


def resume(settings: TrainSettings, engine: Engine, optimizer: Any, data: BatchSource) -> int:
    """Load the checkpoint that the settings ask for, and let the data go on there; returns the steps that are done.

    `auto` takes the newest one that is whole, and says what is wrong with newer ones. Raises UserError: none is whole,
    though there are some, or the one named is not; it is another model's; `auto` finds that it was trained on other
    data. With those, one that is named goes on at their first sample.
    """
    wanted = settings.continue_from
    if wanted == "none":
        return 0
    automatic = wanted == "auto"
    faults: list[str] = []
    for folder in whole_checkpoints(settings.checkpoints) if automatic else [Path(wanted)]:
        checkpoint, found = _open(folder, engine)
        if checkpoint is None or found:
            faults += found
            continue
        for fault in faults:
            _say(engine, f"warning: {fault}; the checkpoint before is taken")
        _continue_data(checkpoint, engine, data, automatic)
        _say(engine, f"goes on at {folder}")
        load(checkpoint, engine, optimizer)
        return checkpoint.step
    if faults:
        mend = "mend one, or begin anew: --resume_from_checkpoint none" if automatic else "name one that is whole"
        raise UserError([*faults, f"{settings.checkpoints if automatic else wanted}: no checkpoint is whole; {mend}"])
    return 0


def _open(folder: Path, engine: Engine) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, and what all ranks together, each reading a share of its files, find wrong with it.

    Raises UserError: it is another model's.
    """
    checkpoint, fault = None, ""
    try:
        checkpoint = open_checkpoint(folder, engine.shape)
        verify(checkpoint, range(engine.rank, len(checkpoint.index["files"]), engine.plan.world_size))
    except BrokenCheckpoint as error:
        fault = str(error)
    return checkpoint, sorted(set(gather_objects(engine, fault)) - {""})


def _continue_data(checkpoint: Checkpoint, engine: Engine, data: BatchSource, automatic: bool) -> None:
    """Let the data go on after the samples that the checkpoint has seen. Raises UserError: they are others."""
    step, then = checkpoint.step, checkpoint.index.get("data")
    samples = 0 if then is None else then["samples"]
    if then and then["identity"] != data.identity:
        was, now = then["identity"], data.identity
        unlike = [
            f"{key} was {was.get(key)}, is {now.get(key)}"
            for key in sorted({*was, *now})
            if was.get(key) != now.get(key)
        ]
        if automatic:
            raise UserError(
                f"{checkpoint.folder}: was trained on other data or in another order: {'; '.join(unlike)}; give the "
                "same again, or name this folder (--resume_from_checkpoint) to go on with these from their beginning"
            )
        samples = 0
        _say(engine, f"warning: {checkpoint.folder}: the data are others and begin anew: {'; '.join(unlike)}")
    elif then and then["global_batch"] != data.global_batch:
        batches = f"the global batch was {then['global_batch']}, is {data.global_batch}"
        _say(engine, f"warning: {batches}; goes on at sample {samples}")
    data.continue_at(step, samples)


def _say(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stderr.write(f"{text}\n")
