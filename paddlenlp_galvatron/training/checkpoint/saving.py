"""Writes checkpoints atomically in the background and, during a run, the model for Hugging Face.

The lowest rank that holds a replicated part writes it. Each rank syncs its file and then writes a small file next to
it; when all have, rank 0 adds the index and gives the checkpoint its name. A checkpoint that was reported saved exists
at every moment: a newer one has its name on disk before an older one is touched.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from ...base import GIB, MIB, GalvatronError, UserError, plain
from ...base.writing import UNFINISHED, make_folder, move, reason_of, to_disk
from ...launch.faults import named, wait_limit_s
from ...launch.status import waiting
from ...plan import Precision, plan_to_dict
from ...runtime import device
from ...runtime.engine import Engine
from ...runtime.units import Trainable
from ..data.source import BatchSource
from ..step_log import StepLog
from .adapters import write_adapters
from .convert import to_huggingface
from .loading import from_first, gather_objects, pieces_of, state_key
from .stored import BEFORE, MOMENTS, POWERS, WEIGHT, open_checkpoint, step_of, whole_checkpoints, write_index
from .weight_files import CONFIG, SHARDS, Tensor, write_tensors

POLL_S = 0.05
MOST_POLL_S = 1.0  # longest polling interval for the files of 1,000 ranks on a shared file system
LINE_S = 15.0  # interval of progress lines of a long write
MAX_SHARD_BYTES = 5 * GIB  # transformers' shard size
WEIGHTS_ALONE = SimpleNamespace(state_dict=dict)  # an optimizer without moments


class Origin(NamedTuple):
    """Parts of a run in each checkpoint besides weights: files of rank 0 by name, the numbers of its recipe, and
    weights with an unusual type."""

    companions: Mapping[str, bytes] = MappingProxyType({})
    recipe: Mapping[str, Any] | None = None
    precisions: Mapping[str, Precision] = MappingProxyType({})


class Writer:
    """Writes checkpoints of an engine in the background and keeps the newest."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        keep: int | None,
        data: BatchSource | None = None,
        origin: Origin = Origin(),
        log: StepLog | None = None,
    ):
        """Every rank makes one, and no other program writes to the folder. `keep`: number of whole checkpoints to keep;
        None: all. `data`: the training data. `log`: synced with each checkpoint, which is an event there."""
        self._folder, self._engine, self._keep, self._data, self._log = folder, engine, keep, data, log
        self._origin, self._began = origin, 0.0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._awaited = ""  # ranks whose parts are missing
        self._best: int | None = None
        if engine.rank == 0:  # before the waiting other ranks write anything
            for kind in ("step", "old"):
                for left in folder.glob(f"{kind}-*{UNFINISHED}"):
                    with suppress(OSError):
                        left.unlink() if left.is_symlink() else shutil.rmtree(left)
        from_first(engine, None)
        self._own = [number for number, trainable in enumerate(engine.trainables) if trainable.is_first_copy]
        make_folder(folder.parent)
        self._run = folder.parent.stat()  # the run's folder, which another program may remove

    def save(self, optimizer: Any, best: int | None = None) -> None:
        """Copy the state now and write it in the background. `best`: step whose checkpoint is kept. Raises
        GalvatronError if the last write failed."""
        self.finish()
        self._require_run()
        self._best, self._began = best, time.monotonic()
        if not self._folder.is_dir():
            try:
                self._folder.mkdir(exist_ok=True)  # not its parents, which another program may be removing
                to_disk(self._folder.parent)
            except FileNotFoundError:
                self._require_run()
                raise
        arrays, tensors, powers = self._copy(optimizer)
        scaler, step = self._engine.scaler, self._engine.steps_done
        index = {
            "step": step,
            "model": asdict(self._engine.shape),
            "model_fingerprint": self._engine.shape.fingerprint,
            "plan": plan_to_dict(self._engine.plan),
            "optimizer": powers,
            "loss_scale": scaler.state if scaler else None,
            "adapters": asdict(self._engine.adapters) if self._engine.adapters else None,
            "data": None if self._data is None else self._data.position(step),
            "recipe": self._origin.recipe and dict(self._origin.recipe),
            "precisions": dict(self._origin.precisions),
        }
        self._thread = threading.Thread(target=self._write, args=(step, arrays, tensors, index), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Raises GalvatronError if it could not be written."""
        while self._thread is not None:
            with waiting(f"parts of a checkpoint by {self._awaited}") if self._awaited else nullcontext():
                self._thread.join(POLL_S)
            self._thread = self._thread if self._thread.is_alive() else None
        if self._error is not None:
            error, self._error = self._error, None
            self._require_run()
            raise GalvatronError(
                f"{self._folder}: a checkpoint could not be written: {reason_of(error)}; the one before is whole"
            )

    def _require_run(self) -> None:
        """Raise GalvatronError if the run's folder was removed: a new folder of this name may be another run's."""
        run = self._folder.parent
        with suppress(FileNotFoundError):
            if os.path.samestat(self._run, run.stat()):
                return
        raise GalvatronError(f"{run}: was removed while this run wrote to it; nothing is saved there, and the run ends")

    def _copy(self, optimizer: Any) -> tuple[list[Tensor], list[dict[str, Any]], dict[str, float]]:
        state = optimizer.state_dict()
        arrays, tensors = [], []
        for number in self._own:
            trainable = self._engine.trainables[number]
            key = f"{number:05d}"
            arrays.append(_copied(f"{key}.{WEIGHT}", trainable.tensor))
            for moment in MOMENTS:
                stored = state.get(state_key(trainable, moment))
                if stored is not None:
                    arrays.append(_copied(f"{key}.{moment}", stored))
            parts = [asdict(piece) | {"offset": offset} for piece, offset in pieces_of(trainable)]
            tensors.append({"key": key, "parts": parts})
        first: Trainable = self._engine.trainables[0]  # every tensor is updated equally often
        powers = {power: float(state[key]) for power in POWERS if (key := state_key(first, power)) in state}
        return arrays, tensors, powers

    def _write(self, step: int, arrays: list[Tensor], tensors: Any, index: dict[str, Any]) -> None:
        try:
            whole = self._folder / f"step-{step:08d}"
            partial_folder = whole.with_name(whole.name + UNFINISHED)
            partial_folder.mkdir(exist_ok=True)  # not its parents, which may have been removed
            to_disk(self._folder)
            name = f"rank-{self._engine.rank:05d}.safetensors"
            facts = write_tensors(partial_folder / name, arrays, Precision.FP32, self._teller(whole, arrays))
            partial = partial_folder / f".{name}.json"
            partial.write_text(json.dumps(asdict(facts) | {"tensors": tensors}))
            to_disk(partial)
            move(partial, partial_folder / f"{name}.json")
            if self._engine.rank == 0:
                self._complete(partial_folder, whole, index)
        except Exception as error:  # raised at the next `finish`
            self._error = error

    def _teller(self, whole: Path, arrays: list[Tensor]) -> Callable[[int], None]:
        """A callback for written bytes: rank 0 prints its progress every LINE_S seconds."""
        total = sum(math.prod(array.shape) for array in arrays) * Precision.FP32.bytes
        written, due = 0, time.monotonic() + LINE_S

        def report(more: int) -> None:
            nonlocal written, due
            written += more
            if self._engine.rank == 0 and time.monotonic() > due:
                due = time.monotonic() + LINE_S
                sys.stderr.write(f"writing {whole}: {written / total:.0%} of {total / MIB:,.0f} MiB of rank 0\n")

        return report

    def _complete(self, partial_folder: Path, whole: Path, index: dict[str, Any]) -> None:
        """Waits for the files of all ranks, completes the checkpoint, and removes old ones."""
        names = [f"rank-{rank:05d}.safetensors.json" for rank in range(self._engine.plan.world_size)]
        deadline = time.monotonic() + (limit_s := wait_limit_s())
        missing, pause_s = list(range(len(names))), POLL_S
        while missing := [rank for rank in missing if not (partial_folder / names[rank]).exists()]:
            if time.monotonic() > deadline:
                raise GalvatronError(f"{self._awaited} did not write a part within {limit_s:.0f} s")
            self._require_run()
            self._awaited = named(tuple(missing))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_POLL_S)
        self._awaited = ""
        index["files"] = [json.loads((partial_folder / name).read_text()) for name in names]
        for file, content in self._origin.companions.items():
            copy = partial_folder / file
            make_folder(copy.parent)
            copy.write_bytes(content)
            to_disk(copy)
            to_disk(copy.parent)
        write_index(partial_folder, index)
        for name in names:
            (partial_folder / name).unlink()
        to_disk(partial_folder)
        if self._log is not None and self._log.path.exists():
            to_disk(self._log.path)
        if whole.exists():  # an earlier run's, of the same step
            previous = whole.with_name(whole.name + BEFORE)
            if previous.exists():
                _remove(previous)
            move(whole, previous)
        move(partial_folder, whole)
        for other in reversed(whole_checkpoints(self._folder)):  # newest last: until then it is the latest
            if step_of(other) > step_of(whole):  # left by a run that this run does not continue
                move(other, other.with_name(f"left-{time.time_ns()}-{other.name}"))
        seconds, gb = time.monotonic() - self._began, sum(file["bytes"] for file in index["files"]) / 1e9
        text = f"saved {whole} in {plain(seconds)} s, {plain(gb)} GB"
        sys.stderr.write(f"{text}\n")
        if self._log is not None:
            facts = {"step": index["step"], "seconds": round(seconds, 3), "gb": gb, "checkpoint": str(whole)}
            self._log.event("saved", text, **facts)
        try:
            for old in whole_checkpoints(self._folder):
                if old.name.endswith(BEFORE):
                    _remove(old)
            for old in whole_checkpoints(self._folder)[self._keep :] if self._keep else ():
                if step_of(old) != self._best:
                    _remove(old)
                    sys.stderr.write(f"removed {old}, as save_total_limit is {self._keep}\n")
        except (OSError, UserError) as error:
            sys.stderr.write(f"warning: {self._folder}: an old checkpoint could not be deleted: {error}\n")


def _copied(key: str, tensor: Any) -> Tensor:
    array = device.to_host(tensor).reshape(-1)
    return Tensor(key, array.shape, lambda: array)


def _remove(whole: Path) -> None:
    """Delete a checkpoint, which is never mistaken for a whole one meanwhile."""
    gone = whole.with_name(f"old-{time.time_ns()}-{whole.name}{UNFINISHED}")
    move(whole, gone)
    shutil.rmtree(gone, ignore_errors=True)


def save_model(engine: Engine, target: Path, origin: Origin) -> None:
    """Write the whole model's weights into a folder that all ranks share; every rank calls it.

    They go through a checkpoint next to the folder, so that no rank holds more than one whole weight. The folder keeps
    its other files, but no older weights. `origin`: the run's. Raises GalvatronError on every rank.
    """
    target = target.absolute()
    partial_folder = target.with_name(f".{target.name}.save_model{UNFINISHED}")
    fault = ""
    try:
        if engine.rank == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)  # left by a killed run
        writer = Writer(partial_folder / "checkpoint", engine, keep=1, origin=origin)
        writer.save(WEIGHTS_ALONE)
        writer.finish()
        if engine.rank == 0:
            checkpoint = open_checkpoint(whole_checkpoints(partial_folder / "checkpoint")[0])
            model = partial_folder / "model"
            if checkpoint.index.adapters:
                write_adapters(checkpoint, model)
            else:
                to_huggingface(checkpoint, model, None, MAX_SHARD_BYTES, None, lambda _: None)
            _move(model, target)
    except (GalvatronError, OSError) as error:
        fault = str(error)
    faults = sorted(set(gather_objects(engine, fault)) - {""})
    if engine.rank == 0:
        shutil.rmtree(partial_folder, ignore_errors=True)
    if faults:
        raise GalvatronError(f"save_model: {'; '.join(faults)}")


def _move(model: Path, target: Path) -> None:
    """Rename a whole folder, or replace the files of an existing folder of this name, config.json last."""
    if not target.exists():
        move(model, target)
        return
    new = sorted(model.iterdir(), key=lambda file: file.name == CONFIG)
    names = {file.name for file in new}
    stale = [file for file in (*target.glob("model*.safetensors"), target / SHARDS) if file.name not in names]
    for file in new:
        if file.is_dir():
            shutil.rmtree(target / file.name, ignore_errors=True)
        file.replace(target / file.name)
    for file in stale:
        file.unlink(missing_ok=True)
    to_disk(target)
