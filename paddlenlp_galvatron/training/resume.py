"""Where a run is resumed: the newest checkpoint that is whole, and the sample after those that it was trained on."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base.errors import UserError
from ..runtime.engine import Engine
from .checkpoint.loading import from_first, gather_objects, load
from .checkpoint.stored import BrokenCheckpoint, Checkpoint, open_checkpoint, verify
from .continuation import candidates, recipe_changes, require_same_adapters, samples_seen
from .data.source import BatchSource
from .settings import TrainSettings
from .step_log import CHANGED, StepLog

VISIBLE_S = 10.0  # in which a file of one node appears on others: network file systems cache listings for seconds
POLL_S = 0.1


def resume(
    settings: TrainSettings,
    engine: Engine,
    optimizer: Any,
    data: BatchSource,
    recipe: Mapping[str, Any] = MappingProxyType({}),
    log: StepLog | None = None,
) -> int:
    """Load the checkpoint that the settings ask for, and let the data continue there; returns the steps that are done.
    `recipe`: `Run.recipe`; a note names the numbers that differ from the checkpoint's. `log` gets the event.

    `auto` takes the newest one that is whole, and says what is wrong with newer ones. Raises UserError: none is whole,
    though there are some, or the one named is not; it is another model's; `auto` finds that it was trained on other
    data. With those, one that is named begins at their first sample.
    """
    require_shared(settings.output_dir, engine)
    seen = candidates(settings) if engine.rank == 0 else None
    wanted, folders = from_first(engine, seen)  # to another node a shared folder may look older
    if wanted == "none":
        return 0
    automatic = wanted == "auto"
    faults: list[str] = []
    say = partial(print_rank_0, engine)
    for folder in folders:
        checkpoint, found_faults = _open(folder, engine)
        if checkpoint is None or found_faults:
            faults += found_faults
            continue
        require_same_adapters(checkpoint, engine.adapters)
        samples = samples_seen(checkpoint, data.identity, data.global_batch, automatic, say)
        if found_faults := _faults_of(engine, partial(load, checkpoint, engine, optimizer)):
            faults += found_faults
            continue
        for fault in faults:
            print_rank_0(engine, f"warning: {fault}; the checkpoint before is taken")
        data.continue_at(checkpoint.step, samples)
        text, changed = f"resuming from {folder}", recipe_changes(checkpoint, recipe)
        say(text)
        if changed:
            words = "; ".join(f"{name}: {was} -> {now}" for name, (was, now) in changed.items())
            say(f"{CHANGED}{words}; the new ones hold from here on")
        if log is not None:
            log.event("resumed", text, step=checkpoint.step, checkpoint=str(folder), changed=changed)
        return checkpoint.step
    if faults:
        mend = "repair one, or start again: --resume_from_checkpoint none" if automatic else "name one that is whole"
        raise UserError([*faults, f"{settings.checkpoints if automatic else wanted}: no checkpoint is whole; {mend}"])
    return 0


def require_shared(folder: Path, engine: Engine) -> None:
    """Raise UserError, on all ranks, where some do not see what rank 0 writes to a folder: on another node, or another
    disk of the same name. A checkpoint would wait for their parts for ever."""
    name = f".seen-{secrets.token_hex(8)}"
    if engine.rank == 0:
        (folder / name).touch()
    name = from_first(engine, name)
    deadline = time.monotonic() + VISIBLE_S
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    blind = [str(rank) for rank, sees in enumerate(gather_objects(engine, seen)) if not sees]
    if engine.rank == 0:
        (folder / name).unlink()
    if blind:
        who = ", ".join(blind[:8]) + (", …" if len(blind) > 8 else "")
        raise UserError(
            f"output_dir: {folder}: rank {who} does not see what rank 0 writes; name a folder that all nodes share"
        )


def _open(folder: Path, engine: Engine) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, whose index rank 0 reads for all, and what all ranks together, each reading a share of its files,
    find wrong with it.

    Raises UserError: it is another model's.
    """
    opened: Checkpoint | UserError | None = None
    if engine.rank == 0:
        try:
            opened = open_checkpoint(folder, engine.shape)
        except UserError as error:
            opened = error
    opened = from_first(engine, opened)
    if isinstance(opened, BrokenCheckpoint):
        return None, [str(opened)]
    if isinstance(opened, UserError):
        raise opened
    assert opened is not None
    files = range(engine.rank, len(opened.index.files), engine.plan.world_size)
    return opened, _faults_of(engine, partial(verify, opened, files))


def _faults_of(engine: Engine, read: Callable[[], object]) -> list[str]:
    """Faults that any rank finds in a checkpoint as it reads; all ranks call this together."""
    fault = ""
    try:
        read()
    except BrokenCheckpoint as error:
        fault = str(error)
    return sorted(set(gather_objects(engine, fault)) - {""})


def print_rank_0(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stderr.write(f"{text}\n")
