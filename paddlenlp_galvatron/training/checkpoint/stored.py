"""Checkpoints on disk: their completeness and integrity, their content, and a run's best.

    output/checkpoints/step-00000020/
      index.json                its content, under which plan
      rank-00000.safetensors    flat fp32 arrays: weights and the optimizer's moments that this rank wrote

A checkpoint is written in `step-….part` and renamed when every file is on disk; before deletion it is renamed. So a
folder named `step-…` is whole unless damaged later: index and files have checksums. While another checkpoint of the
same step replaces it, the old one is called `step-….before`. 16-bit weights are not stored: they are their fp32
masters, rounded.
"""

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...base import FP32_BYTES, MIB, UserError
from ...base.reading import read_json
from ...base.writing import write_text
from ...model import config_of, shape_from_config
from ...model.lora import Adapters, factors_of
from ...plan import ModelShape, Precision

FORMAT = 2
INDEX = "index.json"
BEFORE = ".before"
NAME = re.compile(r"step-(\d{8,16})(" + re.escape(BEFORE) + ")?")
WEIGHT, MOMENTS, POWERS = "weight", ("moment1", "moment2"), ("beta1_pow_acc", "beta2_pow_acc")
BLOCK_BYTES = 16 * MIB  # of a file read at once for its checksum
LARGEST_INDEX_BYTES = 512 * MIB  # 4,096 ranks that hold 100 parts each write 90 MB

Count = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[int, Field(ge=1, lt=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
BEST = "best.json"  # of a run: {"step": …, "metric": …, "value": …}
SMALLER = ("loss", "ppl")  # metrics for which smaller is better


class BrokenCheckpoint(UserError):
    """A checkpoint's files are not as written."""


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())


class StoredSlice(_Stored):
    """`runtime.weights.Slice`."""

    axis: Annotated[int, Field(ge=0, le=1)] | None
    index: Count
    parts: Size
    padded: Size | None


class StoredPart(_Stored):
    """`loading.WeightPiece` with its offset in the tensor."""

    weight: str
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=2)]
    slice: StoredSlice
    start: Count
    stop: Count
    offset: Count

    @model_validator(mode="after")
    def _fits(self) -> Self:
        piece = self.slice
        if piece.axis is None:
            size = math.prod(self.shape) if (piece.index, piece.parts) == (0, 1) else -1
        elif piece.axis >= len(self.shape) or piece.index >= piece.parts:
            size = -1
        else:
            along = (piece.padded or self.shape[piece.axis]) // piece.parts
            size = math.prod(self.shape) // self.shape[piece.axis] * along
        if not self.start <= self.stop <= size:
            raise ValueError(f"numbers {self.start} to {self.stop} are not in its slice")
        return self


class StoredTensor(_Stored):
    """A flat array of a file, whose names are `key.weight`, `key.moment1` and `key.moment2`."""

    key: Annotated[str, Field(pattern=r"^\d{1,12}$")]
    parts: tuple[StoredPart, ...]

    @property
    def numbers(self) -> int:
        """The least length of the array."""
        return max((piece.offset + piece.stop - piece.start for piece in self.parts), default=0)


class StoredFile(_Stored):
    """A file, in the checkpoint's own folder."""

    file: Annotated[str, Field(pattern=r"^\w[\w.-]{0,200}\.safetensors$")]
    bytes: Count
    crc32: Count
    tensors: tuple[StoredTensor, ...]

    @model_validator(mode="after")
    def _holds(self) -> Self:
        if self.bytes < FP32_BYTES * sum(tensor.numbers for tensor in self.tensors):
            raise ValueError(f"{self.bytes} bytes do not hold its tensors")
        return self


class DataPosition(_Stored):
    """`BatchSource.position`."""

    samples: Count
    global_batch: Size
    identity: dict[str, Any]


class Index(_Stored):
    """The content of index.json without its checksum."""

    format: Literal[2]
    step: Count
    model: ModelShape
    model_fingerprint: str
    plan: dict[str, Any] | None
    precision: Precision | None = None  # precision of a converted model, which has no plan
    precisions: dict[str, Precision] = {}  # precisions of weights that differ
    optimizer: dict[Literal["beta1_pow_acc", "beta2_pow_acc"], Number]
    loss_scale: tuple[Number, Count] | None
    data: DataPosition | None
    files: Annotated[tuple[StoredFile, ...], Field(min_length=1)]
    adapters: Adapters | None = None  # if set, only the adapters are stored
    recipe: dict[str, Any] | None = None  # `TrainSettings.recipe` of the run; older checkpoints lack it

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        shape_from_config(config_of(self.model), self.model.name, "model")
        if (self.plan is None) == (self.precision is None):
            raise ValueError("plan: one of plan and precision is given")
        shapes: dict[str, tuple[int, ...]] = {}
        stored: Counter[str] = Counter()
        for piece in (piece for file in self.files for tensor in file.tensors for piece in tensor.parts):
            if shapes.setdefault(piece.weight, piece.shape) != piece.shape:
                raise ValueError(f"{piece.weight}: has several shapes")
            stored[piece.weight] += piece.stop - piece.start
        for weight, shape in shapes.items():
            if stored[weight] < math.prod(shape):
                raise ValueError(f"lacks numbers of {weight}")
        if self.adapters:
            each = (kind.layers * factors_of(kind.layer, self.adapters.rank).parameters for kind in self.model.kinds)
            if sum(each) != sum(map(math.prod, shapes.values())):
                raise ValueError(f"adapters: are not all stored of rank {self.adapters.rank}")
            return self
        if self.model.parameters > (numbers := sum(map(math.prod, shapes.values()))):
            raise ValueError(f"model: has {self.model.parameters} weights, of which {numbers} are stored")
        return self


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    index: Index

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.index.step

    @property
    def shape(self) -> ModelShape:
        """The model of the checkpoint."""
        return self.index.model


def step_of(folder: Path) -> int:
    """The step in a whole checkpoint's name."""
    match = NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def whole_checkpoints(folder: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first. Raises UserError if the folder cannot be read, as starting from
    the beginning would be wrong."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}; mend it, or name another output_dir") from None
    steps = [(int(match[1]), match[2] is None, match[0]) for name in names if (match := NAME.fullmatch(name))]
    return [folder / name for _, _, name in sorted(steps, reverse=True)]


def open_checkpoint(folder: Path, shape: ModelShape | None = None) -> Checkpoint:
    """Raises UserError if it is of another model than `shape`, BrokenCheckpoint if the index is damaged."""
    path = folder / INDEX
    try:
        content = read_json(path, LARGEST_INDEX_BYTES)
    except UserError as error:
        raise BrokenCheckpoint(error.faults) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{path}: is no checkpoint's index of format {FORMAT}")
    checksum, text = content.pop("crc32", None), _canonical(content)
    if checksum != zlib.crc32(text.encode()):
        raise BrokenCheckpoint(f"{path}: its content is not as written (checksum)")
    try:
        index = Index.model_validate_json(text)
    except ValidationError as error:
        raise BrokenCheckpoint(f"{path}: {_first_fault(error)}") from None
    except UserError as error:
        raise BrokenCheckpoint(f"{path}: {fault}" for fault in error.faults) from None
    if shape and index.model.fingerprint != shape.fingerprint:
        raise UserError(f"{folder}: is a checkpoint of {index.model.name}, whose shape is not that of {shape.name}")
    return Checkpoint(folder, index)


def verify(
    checkpoint: Checkpoint, ranks: Sequence[int] | None = None, advance: Callable[[int], object] = lambda read: None
) -> None:
    """Read all files, or those of some ranks, and check lengths and checksums. `advance` receives the number of bytes
    read. Raises BrokenCheckpoint."""
    for number, stored in enumerate(checkpoint.index.files):
        if ranks is None or number in ranks:
            path = checkpoint.folder / stored.file
            try:
                _verify_file(path, stored, advance)
            except OSError as error:
                raise BrokenCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None


def _verify_file(path: Path, stored: StoredFile, advance: Callable[[int], object]) -> None:
    if not path.exists():
        raise BrokenCheckpoint(f"{path}: is missing")
    if not path.is_file():
        raise BrokenCheckpoint(f"{path}: is not a regular file")
    if (has := path.stat().st_size) != stored.bytes:
        raise BrokenCheckpoint(f"{path}: has {has} bytes instead of {stored.bytes}; is it cut off?")
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            advance(len(block))
    if checksum != stored.crc32:
        raise BrokenCheckpoint(f"{path}: its content is not as written (checksum)")


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write a checkpoint's index with its own checksum. Raises UserError."""
    text = _canonical({"format": FORMAT} | index)
    write_text(folder / INDEX, json.dumps(json.loads(text) | {"crc32": zlib.crc32(text.encode())}))


def _canonical(index: dict[str, Any]) -> str:
    """The text of which the checksum is."""
    return json.dumps(index, sort_keys=True)


def _first_fault(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    field = ".".join(map(str, first["loc"]))
    more = f" (and {len(others)} more)" if others else ""
    return f"{field}: {first['msg']}{more}" if field else f"{first['msg'].removeprefix('Value error, ')}{more}"


def checkpoint_of(path: Path, iteration: int | None = None, newest: bool = False) -> Path:
    """If `path` is the folder of a run or its checkpoints: the checkpoint of `iteration` steps, the best, or else the
    newest. Otherwise `path` itself. Raises UserError if there is none of `iteration` steps."""
    checkpoints = whole_checkpoints(path / "checkpoints") or whole_checkpoints(path)
    if not checkpoints and not iteration:  # 0 means any in Galvatron
        return path
    if iteration is None:
        best = None if newest else best_step(path)
        return next((folder for folder in checkpoints if step_of(folder) == best), checkpoints[0])
    for folder in (*checkpoints, path):
        if folder.name[:13] == f"step-{iteration:08d}":
            return folder
    steps = ", ".join(str(int(folder.name[5:13])) for folder in reversed(checkpoints))
    hint = f"there are {steps}" if checkpoints else "it is no run's folder"
    raise UserError(f"load_iteration: {path} has no checkpoint of {iteration} steps: {hint}")


def best_step(run: Path) -> int | None:
    """Steps of a run's best checkpoint; None: none recorded."""
    content = read_json(run / BEST) if (run / BEST).exists() else {}
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int else None


class Best:
    """The best evaluated checkpoint of a run, recorded next to the checkpoints."""

    def __init__(self, run: Path, metric: str, greater: bool, begins_at: int):
        """A best checkpoint of a step after `begins_at` is ignored: this run repeats that step."""
        self._run, self._metric, self._greater = run, metric, greater
        self._evaluated: tuple[int, float] | None = None
        self.step: int | None = None
        self.value = -math.inf if greater else math.inf
        content = read_json(run / BEST) if (run / BEST).exists() else None
        stored = content if isinstance(content, dict) and content.get("metric") == metric else {}
        step, value = stored.get("step"), stored.get("value")
        if type(step) is int and step <= begins_at and type(value) in (int, float):
            self.step, self.value = step, float(str(value))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics after `step` steps."""
        self._evaluated = step, metrics[f"eval_{self._metric}"]

    def saves(self, step: int, write: bool) -> None:
        """A checkpoint after `step` steps is about to be written; `write`: whether this rank records the best."""
        at, value = self._evaluated or (-1, math.nan)
        if at == step and (value > self.value if self._greater else value < self.value):
            self.step, self.value = step, value
            if write:
                record = {"step": step, "metric": self._metric, "value": value}
                write_text(self._run / BEST, json.dumps(record) + "\n")
