"""Checkpoints: written in the background, whole or not at all, and read under any other plan and number of ranks.

    output/checkpoints/step-00000020/
      index.json                what is in it, under which plan; its presence makes the checkpoint whole
      rank-00000.safetensors    flat fp32 arrays: weights and the optimizer's moments that this rank wrote

Of parts that several ranks hold alike the first writes. A checkpoint is made in `step-….part` and renamed when every
file is on disk; one that goes is renamed back first. So a folder named `step-…` is whole, unless it was damaged since:
index and files have checksums. 16-bit weights are not stored: they are their fp32 masters, rounded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..base.reading import read_json
from ..base.writing import write_text
from ..plan import GalvatronError, ModelShape, UserError, plan_to_dict
from ..runtime.engine import Engine
from ..runtime.units import Trainable
from ..runtime.weights import WHOLE, Array, Slice
from .data import BatchSource
from .recipe import next_rate
from .resharding import Part, transfers

FORMAT = 2
INDEX = "index.json"
UNFINISHED = ".part"
WEIGHT, MOMENTS, POWERS = "weight", ("moment1", "moment2"), ("beta1_pow_acc", "beta2_pow_acc")
POLL_S = 0.05
CHUNK_BYTES = 16 * 2**20  # of a file read at once for its checksum


class BrokenCheckpoint(UserError):
    """A checkpoint's files are not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    index: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return int(self.index["step"])

    @property
    def shape(self) -> ModelShape:
        """The model that it is of."""
        return ModelShape(**self.index["model"])


def parts_of(trainable: Trainable) -> list[tuple[Part, int]]:
    """The parts that a trainable tensor holds, and where each begins in it."""
    return [(Part(p.weight.name, p.weight.shape, p.weight.slice, p.start, p.stop), p.offset) for p in trainable.pieces]


# ---- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """Writes checkpoints of an engine in the background, and keeps the newest ones."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        keep: int,
        data: BatchSource | None = None,
        companions: Sequence[Path] = (),
    ):
        """Every rank makes one. `keep`: how many whole checkpoints stay. `data`: what the engine is trained on.
        `companions`: files that are copied into each."""
        self._folder, self._engine, self._keep, self._data = folder, engine, keep, data
        self._companions = companions
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        if engine.rank == 0:  # before the others, who wait in `_owned`, write anything
            for left in folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left, ignore_errors=True)
        self._own = self._owned()

    def save(self, optimizer: Any) -> None:
        """Take a copy of everything now and write it meanwhile. Raises GalvatronError if the last one failed."""
        self.finish()
        arrays, tensors, powers = self._copy(optimizer)
        scaler, step = self._engine.scaler, self._engine.steps_done
        index = {
            "format": FORMAT,
            "step": step,
            "model": asdict(self._engine.shape),
            "model_fingerprint": self._engine.shape.fingerprint,
            "plan": plan_to_dict(self._engine.plan),
            "optimizer": powers,
            "loss_scale": scaler.state if scaler else None,
            "data": None if self._data is None else self._data.position(step),
        }
        self._thread = threading.Thread(target=self._write, args=(step, arrays, tensors, index), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Raises GalvatronError if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            reason = getattr(error, "strerror", None) or str(error)
            raise GalvatronError(
                f"{self._folder}: a checkpoint could not be written: {reason}; the one before is whole"
            )

    def _owned(self) -> list[int]:
        """Numbers of the trainables that this rank writes: those that no lower rank holds."""
        mine = [[asdict(part) for part, _ in parts_of(trainable)] for trainable in self._engine.trainables]
        everybody = gather_objects(self._engine, mine)
        lower = {json.dumps(parts) for rank in range(self._engine.rank) for parts in everybody[rank]}
        return [number for number, parts in enumerate(mine) if json.dumps(parts) not in lower]

    def _copy(self, optimizer: Any) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]]:
        state = optimizer.state_dict()
        arrays, tensors = {}, []
        for number in self._own:
            trainable = self._engine.trainables[number]
            key = f"{number:05d}"
            arrays[f"{key}.{WEIGHT}"] = trainable.tensor.numpy().reshape(-1).copy()
            for moment in MOMENTS:
                stored = state.get(_state_key(trainable, moment))
                if stored is not None:
                    arrays[f"{key}.{moment}"] = stored.numpy().reshape(-1).copy()
            parts = [asdict(part) | {"offset": offset} for part, offset in parts_of(trainable)]
            tensors.append({"key": key, "parts": parts})
        first = self._engine.trainables[0]  # every tensor is updated equally often
        powers = {power: float(state[key]) for power in POWERS if (key := _state_key(first, power)) in state}
        return arrays, tensors, powers

    def _write(self, step: int, arrays: Any, tensors: Any, index: dict[str, Any]) -> None:
        try:
            whole = self._folder / f"step-{step:08d}"
            part = whole.with_name(whole.name + UNFINISHED)
            part.mkdir(parents=True, exist_ok=True)
            name = f"rank-{self._engine.rank:05d}.safetensors"
            save_file(arrays, part / name)
            _to_disk(part / name)
            write_text(part / f"{name}.json", json.dumps(file_facts(part / name) | {"tensors": tensors}))
            if self._engine.rank == 0:
                self._complete(part, whole, index)
        except Exception as error:  # told at the next `finish`
            self._error = error

    def _complete(self, part: Path, whole: Path, index: dict[str, Any]) -> None:
        """When all ranks have written theirs: make the checkpoint whole, and drop old ones."""
        names = [f"rank-{rank:05d}.safetensors.json" for rank in range(self._engine.plan.world_size)]
        while not all((part / name).exists() for name in names):
            time.sleep(POLL_S)
        index["files"] = [json.loads((part / name).read_text()) for name in names]
        for file in self._companions:
            shutil.copyfile(file, part / file.name)
        write_index(part, index)
        for name in names:
            (part / name).unlink()
        _to_disk(part)
        if whole.exists():  # an earlier run's, of the same step
            _remove(whole)
        part.rename(whole)
        _to_disk(self._folder)
        for later in whole_checkpoints(self._folder):
            if later.name > whole.name:  # of a run that this one does not go on with
                later.rename(later.with_name(f"left-{time.time_ns()}-{later.name}"))
        for old in whole_checkpoints(self._folder)[self._keep :]:
            _remove(old)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write a checkpoint's index with its own checksum. Raises UserError."""
    write_text(folder / INDEX, json.dumps(index | {"crc32": _index_checksum(index)}))


def gather_objects(engine: Engine, mine: Any) -> list[Any]:
    """What each rank gives, in rank order, on every rank."""
    everybody = [mine]
    if engine.plan.world_size > 1:
        everybody = []
        dist.all_gather_object(everybody, mine)
    return everybody


def _remove(whole: Path) -> None:
    """Delete a checkpoint; half deleted it is never taken for a whole one."""
    gone = whole.with_name(f"old-{whole.name}{UNFINISHED}")
    shutil.rmtree(gone, ignore_errors=True)
    whole.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _state_key(trainable: Trainable, kind: str) -> str:
    return f"{trainable.tensor.name}_{kind}_0"  # as Paddle's optimizers name their state


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_facts(path: Path) -> dict[str, Any]:
    """What an index says of a file, besides what is in it."""
    return {"file": path.name, "bytes": path.stat().st_size, "crc32": _checksum(path)}


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _index_checksum(index: dict[str, Any]) -> int:
    rest = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# ---- reading ---------------------------------------------------------------------------------------------------------


def whole_checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints that were written to their end, the newest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != UNFINISHED), reverse=True)


def open_checkpoint(folder: Path, shape: ModelShape | None = None) -> Checkpoint:
    """Raises UserError: it is another model's than `shape`; BrokenCheckpoint: the index is damaged."""
    try:
        index = read_json(folder / INDEX)
    except UserError as error:
        raise BrokenCheckpoint(error.faults) from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{folder / INDEX}: is no checkpoint's index of format {FORMAT}")
    if index.get("crc32") != _index_checksum(index):
        raise BrokenCheckpoint(f"{folder / INDEX}: its content is not what was written (checksum)")
    if shape and index["model_fingerprint"] != shape.fingerprint:
        raise UserError(
            f"{folder}: is a checkpoint of {index['model']['name']}, whose shape is not that of {shape.name}"
        )
    return Checkpoint(folder, index)


def verify(checkpoint: Checkpoint, ranks: Sequence[int] | None = None) -> None:
    """Read the files, or those that some ranks wrote, and check lengths and checksums. Raises
    BrokenCheckpoint."""
    for number, facts in enumerate(checkpoint.index["files"]):
        if ranks is None or number in ranks:
            path = checkpoint.folder / facts["file"]
            if not path.exists():
                raise BrokenCheckpoint(f"{path}: is missing")
            if path.stat().st_size != facts["bytes"]:
                has = path.stat().st_size
                raise BrokenCheckpoint(f"{path}: has {has} bytes instead of {facts['bytes']}; is it cut off?")
            if _checksum(path) != facts["crc32"]:
                raise BrokenCheckpoint(f"{path}: its content is not what was written (checksum)")


def load(checkpoint: Checkpoint, engine: Engine, optimizer: Any) -> None:
    """Give an engine and its optimizer the checkpoint's state, whatever plan it was written under. Raises UserError."""
    stored = _Stored(checkpoint)
    state: dict[str, Any] = {}
    powers = checkpoint.index["optimizer"]
    for trainable in engine.trainables:
        with paddle.no_grad():
            array = stored.fill(trainable, WEIGHT)
            paddle.assign(paddle.to_tensor(array.reshape(trainable.tensor.shape)), output=trainable.tensor)
            trainable.owner.publish(trainable.tensor)
        if powers:
            for moment in MOMENTS:
                array = stored.fill(trainable, moment).reshape(trainable.tensor.shape)
                state[_state_key(trainable, moment)] = paddle.to_tensor(array)
            for power, value in powers.items():
                state[_state_key(trainable, power)] = paddle.to_tensor([value], "float32")
    if state:
        optimizer.set_state_dict(state)
    if engine.scaler and checkpoint.index["loss_scale"]:
        engine.scaler.state = checkpoint.index["loss_scale"]
    engine.steps_done = checkpoint.step
    next_rate(optimizer, checkpoint.step)


def whole_weights(checkpoint: Checkpoint, kind: str = WEIGHT) -> Iterator[tuple[str, Any]]:
    """Every weight by name, fp32 and whole, one at a time; or a moment of each."""
    stored = _Stored(checkpoint)
    for name, shape in sorted(stored.shapes().items()):
        array = np.zeros(int(np.prod(shape)), np.float32)
        stored.fill_part(Part(name, shape, WHOLE, 0, array.size), kind, array)
        yield name, array.reshape(shape)


class CheckpointWeights:
    """The weights of a checkpoint, as a `runtime.weights.WeightSource`: only what is asked for is read."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._stored = _Stored(checkpoint)

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> Array:
        """Raises UserError: the checkpoint lacks numbers of the part."""
        intervals = (part.interval(axis, length) for axis, length in enumerate(shape))
        local = [stop - start for start, stop in intervals]
        array = np.zeros(math.prod(local), np.float32)
        self._stored.fill_part(Part(name, shape, part, 0, array.size), WEIGHT, array)
        return array.reshape(local)


class _Stored:
    """The numbers of a checkpoint by weight."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder = checkpoint.folder
        self._parts: dict[str, list[tuple[Part, str, str, int]]] = {}  # part, file, key, offset
        for facts in checkpoint.index["files"]:
            for tensor in facts["tensors"]:
                for item in tensor["parts"]:
                    place = (facts["file"], tensor["key"], item["offset"])
                    self._parts.setdefault(item["weight"], []).append((_part(item), *place))

    def fill(self, trainable: Trainable, kind: str) -> Any:
        """A flat fp32 array of what the trainable tensor is to hold; padding is zero."""
        out = np.zeros(trainable.tensor.size, np.float32)
        for part, offset in parts_of(trainable):
            self.fill_part(part, kind, out[offset : offset + part.stop - part.start])
        return out

    def fill_part(self, part: Part, kind: str, out: Any) -> None:
        """Write the numbers of a part into a flat array."""
        filled = np.zeros(len(out), bool)
        for source, file, key, begin in self._parts.get(part.weight, ()):
            self._copy(source, part, file, f"{key}.{kind}", begin, out, filled)
        if int(filled.sum()) != part.real:
            raise BrokenCheckpoint(f"{self._folder}: lacks numbers of {part.weight}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole weight."""
        return {name: parts[0][0].shape for name, parts in self._parts.items()}

    def _copy(self, source: Part, target: Part, file: str, key: str, begin: int, out: Any, filled: Any) -> None:
        for move in transfers(source, target):
            given, wanted = move.source, move.target
            first = begin + given.begin + (move.row - given.row) * given.columns + move.column - given.column
            start = wanted.begin + (move.row - wanted.row) * wanted.columns
            place = slice(start, start + move.rows * wanted.columns)
            columns = slice(move.column - wanted.column, move.column - wanted.column + move.columns)
            rows = self._read(file, key, first, move.rows, move.columns, given.columns)
            out[place].reshape(move.rows, wanted.columns)[:, columns] = rows
            filled[place].reshape(move.rows, wanted.columns)[:, columns] = True

    def _read(self, file: str, key: str, first: int, rows: int, columns: int, width: int) -> Any:
        """[rows, columns] of a flat tensor: rows begin `width` numbers after one another, the first at `first`."""
        path = self._folder / file
        try:
            with safe_open(path, framework="numpy") as tensors:
                flat = tensors.get_slice(key)
                if columns == width:
                    return flat[first : first + rows * width].reshape(rows, columns)
                block = np.empty((rows, columns), np.float32)
                for row in range(rows):
                    start = first + row * width
                    block[row] = flat[start : start + columns]
                return block
        except (OSError, SafetensorError) as error:
            raise BrokenCheckpoint(f"{path}: tensor {key} cannot be read: {error}") from None


def _part(item: dict[str, Any]) -> Part:
    return Part(item["weight"], tuple(item["shape"]), Slice(**item["slice"]), item["start"], item["stop"])
