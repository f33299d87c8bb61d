"""Where a run goes on: the newest checkpoint that is whole, and the sample after those that it was trained on."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..runtime.engine import Engine
from .checkpoint.loading import from_first, gather_objects, load
from .checkpoint.stored import BrokenCheckpoint, Checkpoint, open_checkpoint, verify, whole_checkpoints
from .data.source import BatchSource
from .settings import TrainSettings

VISIBLE_S = 10.0  # in which a file of one node appears on others: network file systems keep what they saw for seconds
POLL_S = 0.1
LATER = ("checksums", "special_tokens", "split_special_tokens")  # of the data's identity; older checkpoints lack them


def resume(settings: TrainSettings, engine: Engine, optimizer: Any, data: BatchSource) -> int:
    """Load the checkpoint that the settings ask for, and let the data go on there; returns the steps that are done.

    `auto` takes the newest one that is whole, and says what is wrong with newer ones. Raises UserError: none is whole,
    though there are some, or the one named is not; it is another model's; `auto` finds that it was trained on other
    data. With those, one that is named begins at their first sample.
    """
    require_shared(settings.output_dir, engine)
    seen = _seen(settings) if engine.rank == 0 else None
    wanted, folders = from_first(engine, seen)  # to another node a shared folder may look older
    if wanted == "none":
        return 0
    automatic = wanted == "auto"
    faults: list[str] = []
    for folder in folders:
        checkpoint, found = _open(folder, engine)
        if checkpoint is None or found:
            faults += found
            continue
        _require_same_adapters(checkpoint, engine)
        samples = _samples_seen(checkpoint, engine, data, automatic)
        if found := _faults_of(engine, partial(load, checkpoint, engine, optimizer)):
            faults += found
            continue
        for fault in faults:
            print_rank_0(engine, f"warning: {fault}; the checkpoint before is taken")
        data.continue_at(checkpoint.step, samples)
        print_rank_0(engine, f"resuming from {folder}")
        return checkpoint.step
    if faults:
        mend = "mend one, or begin anew: --resume_from_checkpoint none" if automatic else "name one that is whole"
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


def _seen(settings: TrainSettings) -> tuple[str, list[Path]]:
    """The option's value and the checkpoints to try. Raises UserError."""
    wanted = settings.continue_from
    return wanted, whole_checkpoints(settings.checkpoints) if wanted == "auto" else [Path(wanted)]


def _open(folder: Path, engine: Engine) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, whose index rank 0 reads for all, and what all ranks together, each reading a share of its files,
    find wrong with it.

    Raises UserError: it is another model's.
    """
    found: Checkpoint | UserError | None = None
    if engine.rank == 0:
        try:
            found = open_checkpoint(folder, engine.shape)
        except UserError as error:
            found = error
    found = from_first(engine, found)
    if isinstance(found, BrokenCheckpoint):
        return None, [str(found)]
    if isinstance(found, UserError):
        raise found
    assert found is not None
    files = range(engine.rank, len(found.index.files), engine.plan.world_size)
    return found, _faults_of(engine, partial(verify, found, files))


def _faults_of(engine: Engine, read: Callable[[], object]) -> list[str]:
    """Faults that any rank finds in a checkpoint as it reads; all ranks call this together."""
    fault = ""
    try:
        read()
    except BrokenCheckpoint as error:
        fault = str(error)
    return sorted(set(gather_objects(engine, fault)) - {""})


def _require_same_adapters(checkpoint: Checkpoint, engine: Engine) -> None:
    """Raise UserError unless the same weights learn in the run, beside the same frozen ones."""
    then, now = checkpoint.index.adapters, engine.adapters
    if then == now:
        return
    if then is None or now is None:
        learns = "all weights" if then is None else "adapters"
        raise UserError(f"{checkpoint.folder}: {learns} were trained there; say the same --task, or another output_dir")
    unlike = [name for name in asdict(now) if getattr(then, name) != getattr(now, name)]
    raise UserError(
        f"{checkpoint.folder}: its adapters are others ({', '.join(unlike)}); give the same base and options again, or "
        "another output_dir"
    )


def _samples_seen(checkpoint: Checkpoint, engine: Engine, data: BatchSource, automatic: bool) -> int:
    """How many of the data's samples the checkpoint was trained on. Raises UserError: on others."""
    then = checkpoint.index.data
    if then is None:
        return 0
    was, now = then.identity, data.identity
    if unknown := [key for key in LATER if key in now and key not in was]:
        now = {key: value for key, value in now.items() if key not in unknown}
        print_rank_0(engine, f"note: {checkpoint.folder}: is older and does not say its data's {', '.join(unknown)}")
    if was != now:
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
        print_rank_0(engine, f"warning: {checkpoint.folder}: the data are others and begin anew: {'; '.join(unlike)}")
        return 0
    if then.global_batch != data.global_batch:
        batches = f"the global batch was {then.global_batch}, is {data.global_batch}"
        print_rank_0(engine, f"warning: {batches}; resuming at sample {then.samples}")
    return then.samples


def print_rank_0(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stderr.write(f"{text}\n")
