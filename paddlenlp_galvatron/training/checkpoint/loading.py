"""Reads weights and checkpoints under any plan and number of ranks: each rank reads its own part.

A stored piece is elements `start..stop-1` of the flattened slice of a weight that a rank held (`runtime.units.Piece`).
In the whole weight (a matrix) that is up to three rectangles: the end of a row, whole rows, the start of a row. Vectors
are matrices of one column. `transfers` are the copies from a stored piece's rectangles to a target's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
from safetensors import safe_open

from ...base.errors import UserError
from ...plan import ModelShape, Precision
from ...runtime.collectives import broadcast
from ...runtime.groups import world_from_environment
from ...runtime.paddle_private import next_rate, state_of
from ...runtime.units import Trainable
from ...runtime.weights import WHOLE, Array, Slice
from .huggingface import HuggingFaceWeights, require_same_model
from .stored import INDEX, MOMENTS, WEIGHT, BrokenCheckpoint, Checkpoint, open_checkpoint, verify
from .weight_files import CONFIG, naming, require_finite

if TYPE_CHECKING:  # the engine imports PaddleNLP, which takes seconds; weights are checked before
    from ...runtime.engine import Engine

MOST_OPEN = 64  # open files; the default limit of a process is 1,024


class Rectangle(NamedTuple):
    """Rows and columns of a whole weight, and the offset of its numbers in the piece."""

    row: int
    column: int
    rows: int
    columns: int
    begin: int


class Transfer(NamedTuple):
    """Rows and columns of a stored rectangle that go to a rectangle of the target."""

    source: Rectangle
    target: Rectangle
    row: int  # first row and column in the whole weight; numbers of rows and columns
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class WeightPiece:
    """A piece of a weight as described in checkpoints, only numbers."""

    weight: str
    shape: tuple[int, ...]  # shape of the whole weight
    slice: Slice
    start: int
    stop: int

    @property
    def rows(self) -> range:
        """The rows of the whole weight that contain the part."""
        top, _ = self.slice.interval(0, self.shape[0])
        left, right = self.slice.interval(1, self.shape[1]) if len(self.shape) > 1 else (0, 1)
        return range(top + self.start // (right - left), top + -(-self.stop // (right - left)))

    def rectangles(self) -> Iterator[Rectangle]:
        """Yields rectangles in the order of the elements, without padding, which is zero under every plan."""
        height, width = (self.shape[0], 1) if len(self.shape) == 1 else self.shape
        top, bottom = self.slice.interval(0, height)
        left, right = self.slice.interval(1, width) if len(self.shape) > 1 else (0, 1)
        width_held = right - left
        position = self.start
        while position < self.stop:
            row, column = divmod(position, width_held)
            if column or self.stop - position < width_held:
                rows, columns = 1, min(width_held - column, self.stop - position)
            else:
                rows, columns = (self.stop - position) // width_held, width_held
            # Clip elements beyond the real weight. Padding is at the end of the axis that is split.
            real_rows = min(rows, max(0, min(bottom, height) - (top + row)))
            real_columns = min(columns, max(0, min(right, width) - (left + column)))
            if columns == width_held and real_columns < columns:  # padded columns: row by row
                for k in range(real_rows):
                    begin = position - self.start + k * width_held
                    if real_columns:
                        yield Rectangle(top + row + k, left + column, 1, real_columns, begin)
            elif real_rows and real_columns:
                yield Rectangle(top + row, left + column, real_rows, real_columns, position - self.start)
            position += rows * columns

    @property
    def real(self) -> int:
        """Number of elements without padding."""
        return sum(rectangle.rows * rectangle.columns for rectangle in self.rectangles())


def transfers(source: WeightPiece, target: WeightPiece) -> Iterator[Transfer]:
    """Copies from a stored part to a part of the target. Both are of one weight."""
    for stored in source.rectangles():
        for wanted in target.rectangles():
            top, left = max(stored.row, wanted.row), max(stored.column, wanted.column)
            bottom = min(stored.row + stored.rows, wanted.row + wanted.rows)
            right = min(stored.column + stored.columns, wanted.column + wanted.columns)
            if top < bottom and left < right:
                yield Transfer(stored, wanted, top, left, bottom - top, right - left)


def pieces_of(trainable: Trainable) -> list[tuple[WeightPiece, int]]:
    """The pieces of a trainable tensor, with their offsets."""
    return [
        (WeightPiece(p.weight.name, p.weight.shape, p.weight.slice, p.start, p.stop), p.offset)
        for p in trainable.pieces
    ]


def state_key(trainable: Trainable, kind: str) -> str:
    """Name of a state of the tensor in Paddle's optimizers."""
    return f"{trainable.tensor.name}_{kind}_0"


def gather_objects(engine: Engine, item: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank."""
    items = [item]
    if engine.plan.world_size > 1:
        items = []
        dist.all_gather_object(items, item)
    return items


def from_first(engine: Engine, item: Any) -> Any:
    """Rank 0's object, on every rank."""
    shared = [item if engine.rank == 0 else None]
    if engine.plan.world_size > 1:
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def print_rank_0(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stderr.write(f"{text}\n")


def load(checkpoint: Checkpoint, engine: Engine, optimizer: Any) -> None:
    """Give an engine and its optimizer the checkpoint's state, written under any plan. All ranks call this.

    After all ranks have read, raises BrokenCheckpoint on ranks that found a fault; the state is then unusable.
    """
    stored = _ReadOnce(checkpoint)
    powers = checkpoint.index.optimizer
    for trainable in engine.trainables:
        with paddle.no_grad():
            values = stored.tensor(trainable, WEIGHT)
            trainable.tensor.copy_(values, True)  # the tensor may be in host memory
            trainable.owner.publish(values)
            trainable.published()
            states = {kind: state_of(optimizer, trainable.tensor, kind) for kind in (*MOMENTS, *powers)}
            for moment in MOMENTS if powers and states[MOMENTS[0]] is not None else ():
                states[moment].copy_(stored.tensor(trainable, moment), True)
            for power, value in powers.items():
                if states[power] is not None:
                    states[power].set_value(np.array([value], np.float32))
    if stored.fault:
        raise stored.fault
    if engine.scaler and checkpoint.index.loss_scale:
        engine.scaler.state = checkpoint.index.loss_scale
    engine.steps_done = checkpoint.step
    next_rate(optimizer, checkpoint.step)


class CheckpointWeights:
    """The weights of a checkpoint, as a `runtime.weights.WeightSource`: only requested weights are read."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.files = sorted(checkpoint.folder / stored.file for stored in checkpoint.index.files)
        self._stored = StoredNumbers(checkpoint)

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        """Raises UserError if the checkpoint lacks elements of the part."""
        local = rank_slice.size(shape)
        array = np.zeros(math.prod(local), np.float32)
        self._stored.fill_part(WeightPiece(name, shape, rank_slice, 0, array.size), WEIGHT, array)
        require_finite(array, self.checkpoint.folder, name)
        return array.reshape(local)


class StoredNumbers:
    """The numbers of a checkpoint by weight."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder = checkpoint.folder
        self._opened: Any = lru_cache(maxsize=MOST_OPEN)(partial(safe_open, framework="numpy"))
        self._parts: dict[str, list[tuple[WeightPiece, range, str, str, int]]] = {}  # part, its rows, file, key, offset
        for stored in checkpoint.index.files:
            for tensor in stored.tensors:
                for item in tensor.parts:
                    cut = Slice(**item.slice.model_dump())
                    piece = WeightPiece(item.weight, item.shape, cut, item.start, item.stop)
                    location = piece, piece.rows, stored.file, tensor.key, item.offset
                    self._parts.setdefault(item.weight, []).append(location)

    def fill(self, trainable: Trainable, kind: str) -> Any:
        """A flat fp32 array for the trainable tensor; padding is zero."""
        out = np.zeros(trainable.tensor.size, np.float32)
        for piece, offset in pieces_of(trainable):
            self.fill_part(piece, kind, out[offset : offset + piece.stop - piece.start])
        return out

    def fill_part(self, piece: WeightPiece, kind: str, out: Any) -> None:
        """Write the numbers of a part into a flat array."""
        filled, wanted = np.zeros(len(out), bool), piece.rows
        for source, rows, file, key, begin in self._parts.get(piece.weight, ()):
            if rows.stop <= wanted.start or wanted.stop <= rows.start:
                continue
            if source.shape != piece.shape:
                raise BrokenCheckpoint(f"{self._folder}: {piece.weight} is {source.shape} instead of {piece.shape}")
            self._copy(source, piece, file, f"{key}.{kind}", begin, out, filled)
        if int(filled.sum()) != piece.real:
            raise BrokenCheckpoint(f"{self._folder}: lacks numbers of {piece.weight}")

    def _copy(
        self, source: WeightPiece, target: WeightPiece, file: str, key: str, begin: int, out: Any, filled: Any
    ) -> None:
        for move in transfers(source, target):
            stored, wanted = move.source, move.target
            first = begin + stored.begin + (move.row - stored.row) * stored.columns + move.column - stored.column
            start = wanted.begin + (move.row - wanted.row) * wanted.columns
            target_range = slice(start, start + move.rows * wanted.columns)
            columns = slice(move.column - wanted.column, move.column - wanted.column + move.columns)
            rows = self._read(file, key, first, move.rows, move.columns, stored.columns)
            out[target_range].reshape(move.rows, wanted.columns)[:, columns] = rows
            filled[target_range].reshape(move.rows, wanted.columns)[:, columns] = True

    def _read(self, file: str, key: str, first: int, rows: int, columns: int, width: int) -> Any:
        """[rows, columns] of a flat tensor: row starts are `width` elements apart, the first at `first`."""
        path = self._folder / file
        last = first + (rows - 1) * width + columns
        try:
            with naming(path):
                flat = self._opened(path).get_slice(key)
                size = flat.get_shape()
                if flat.get_dtype() != Precision.FP32.code or len(size) != 1 or size[0] < last:
                    raise BrokenCheckpoint(f"{path}: tensor {key} is not {last} or more numbers in fp32")
                if columns == width:
                    return flat[first:last].reshape(rows, columns)
                block = np.empty((rows, columns), np.float32)
                for row in range(rows):
                    start = first + row * width
                    block[row] = flat[start : start + columns]
                return block
        except UserError as error:
            raise BrokenCheckpoint(error.faults) from None


class _ReadOnce(StoredNumbers):
    """Reads each tensor on one of its ranks and broadcasts it to the others."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint)
        self.fault: BrokenCheckpoint | None = None

    def tensor(self, trainable: Trainable, kind: str) -> Any:
        """New content of the trainable tensor, in its shape."""
        holders = trainable.holders
        if holders is not None and holders.rank > 0:
            tensor = paddle.empty(trainable.tensor.shape, "float32")
        else:
            tensor = paddle.to_tensor(self._read_or_note(trainable, kind).reshape(trainable.tensor.shape))
        if holders is not None:
            broadcast(tensor, holders)
        return tensor

    def _read_or_note(self, trainable: Trainable, kind: str) -> Any:
        """Placeholder of a failed read, because the other ranks wait for the broadcast."""
        try:
            return self.fill(trainable, kind)
        except BrokenCheckpoint as error:
            self.fault = self.fault or error
            return np.zeros(trainable.tensor.size, np.float32)


def weights_from(folder: Path, shape: ModelShape) -> HuggingFaceWeights | CheckpointWeights:
    """The weights of a Hugging Face directory, or of a checkpoint, converted or a run's; for `Engine`'s `source`.

    Each rank reads the requested parts. Before that, the ranks together verify a checkpoint's checksums, each for a
    share of the files. Raises UserError if anything is broken, missing, or of another model.
    """
    source = open_weights(folder, shape)
    if isinstance(source, CheckpointWeights):
        rank, world_size = world_from_environment()
        verify(source.checkpoint, range(rank, len(source.checkpoint.index.files), world_size))
    return source


def open_weights(folder: Path, shape: ModelShape) -> HuggingFaceWeights | CheckpointWeights:
    """Opens the weights of `weights_from` quickly, without verifying checksums. Raises UserError."""
    if (folder / INDEX).exists():
        checkpoint = open_checkpoint(folder)
        require_same_model(checkpoint.shape, shape, folder / INDEX)
        return CheckpointWeights(checkpoint)
    if (folder / CONFIG).exists():
        return HuggingFaceWeights(folder, shape)
    raise UserError(f"{folder}: is neither a Hugging Face model ({CONFIG}) nor a checkpoint ({INDEX})")
