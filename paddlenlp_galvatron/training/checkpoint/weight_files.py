"""safetensors files: writes them with one tensor in memory at a time, opens them with readable errors, and finds the
weight files of a Hugging Face directory like transformers 5, with reasons to refuse others."""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ml_dtypes as ml_dtypes  # registers bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open

from ...base.errors import UserError
from ...base.reading import read_json
from ...plan import ModelShape, Precision


@dataclass(frozen=True)
class Tensor:
    """A tensor to write, whose values are requested only when written."""

    key: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, np.dtype[np.float32]]]
    precision: Precision | None = None  # the tensor's own; None: the file's


@dataclass(frozen=True)
class FileFacts:
    """A file's entry in a checkpoint's index, without the list of its content."""

    file: str
    bytes: int
    crc32: int


def write_tensors(
    path: Path,
    tensors: Sequence[Tensor],
    precision: Precision,
    advance: Callable[[int], object] = lambda _: None,
    framework: str = "pt",
) -> FileFacts:
    """Write and sync a file; the library's writer needs all tensors at once. `advance` receives the number of written
    bytes. `framework`: whose layout the tensors have, which readers rely on.

    Raises OSError; UserError for values that the type cannot hold. Source of the format: safetensors' documentation.
    """
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": framework}}
    for tensor in tensors:
        stored_as = tensor.precision or precision
        end = offset + math.prod(tensor.shape) * stored_as.bytes
        header[tensor.key] = {"dtype": stored_as.code, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8
    beginning = len(text).to_bytes(8, "little") + text
    checksum = zlib.crc32(beginning)
    with path.open("wb") as file:
        file.write(beginning)
        for tensor in tensors:
            content = _bytes_of(tensor, tensor.precision or precision)
            checksum = zlib.crc32(content, checksum)
            advance(file.write(content))
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(path.name, len(beginning) + offset, checksum)


def _bytes_of(tensor: Tensor, precision: Precision) -> Any:
    array = tensor.read()
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, precision.dtype)
    if precision is Precision.FP16 and not np.isfinite(stored).all() and np.isfinite(array).all():
        raise UserError(f"{tensor.key}: has numbers that fp16 cannot hold; choose bf16 or fp32")
    return stored.reshape(-1).view(np.uint8)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises UserError if it is missing or broken."""
    with naming(path), safe_open(path, framework="numpy") as file:
        yield file


def require_finite(array: np.ndarray[Any, Any], path: Path, tensor: str) -> None:
    """Raise UserError for NaN or infinite weights."""
    if not np.isfinite(array).all():
        raise UserError(f"{path}: tensor {tensor} has numbers that are NaN or infinite; take weights from before")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise a UserError with the file's name if a safetensors file is missing or broken."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; is it cut off, or not downloaded?") from None


CONFIG, SINGLE, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
BUFFERS = "rotary_emb.inv_freq"  # computed, not trained; in old files
FOREIGN = read_json(Path(__file__).with_name("foreign_weights.json"))
# Other files with weights: pattern of their names -> kind and remedy; the first match is used.
OTHERS: dict[str, str] = FOREIGN["files"]
# Prefixes of names: substring -> program and remedy; "": any other.
WRAPPERS: dict[str, str] = FOREIGN["wrappers"]
# Tensors next to the weights of fp8, GPTQ, AWQ, bitsandbytes, compressed-tensors, AQLM, MXFP4, PaddleNLP's weight-only.
QUANTISED = re.compile(
    r"(^|[._])(scales?|scale_inv|scale_2|qweight|qzeros|g_idx|SCB|absmax|packed|zero_point|weight_(shape|format)|codes"
    r"|codebooks|blocks|(nested_)?quant_.*)$"
)


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises UserError if there is none or an index contradicts its files."""
    config = read_json(folder / CONFIG)
    if isinstance(config, dict) and (other := config.get("transformers_weights")) is not None:
        raise UserError(f"{folder / CONFIG}: transformers_weights names {other!r}; {SINGLE} or {SHARDS} alone is read")
    single, index = folder / SINGLE, folder / SHARDS
    if single.is_file():  # an index next to it is a leftover, also for transformers
        return dict.fromkeys(sorted(_names(single)), single)
    if not index.is_file():
        raise UserError(f"{folder}: has neither {SINGLE} nor {SHARDS}; {_instead(folder)}")
    places = _places(index)
    for name in sorted(set(places.values())):
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: is missing, but {SHARDS} names it; download the model again")
        has, named = _names(file), {tensor for tensor, stored_in in places.items() if stored_in == name}
        for tensor in sorted(has ^ named):
            has_it, says = ("lacks", "names") if tensor in named else ("has", "does not name")
            raise UserError(
                f"{file}: {has_it} tensor {tensor}, which {SHARDS} {says} there: they are not of one model; download "
                "or save it again"
            )
    return {tensor: folder / name for tensor, name in places.items()}


def without_absent_mtp(shape: ModelShape, folder: Path) -> ModelShape:
    """The model without MTP if a directory's weights have none: transformers drops them, but not from config.json."""
    if not shape.mtp_layers or not any((folder / name).is_file() for name in (SINGLE, SHARDS)):
        return shape
    prefix = f".layers.{shape.main_layers}."
    return shape if any(prefix in tensor for tensor in tensor_files(folder)) else shape.having(shape.main_layers, 0)


def require_plain(unknown: Iterable[str], folder: Path) -> None:
    """Raise UserError for a tensor that a quantised model has in addition to its weights."""
    for tensor in unknown:
        if QUANTISED.search(tensor):
            raise UserError(
                f"{folder}: has tensor {tensor}: its weights are quantised; take the model that they were made from"
            )


def require_unwrapped(unknown: Iterable[str], wanted: str, folder: Path) -> None:
    """Raise UserError if a required tensor exists with another prefix, as of a model inside another."""
    name = wanted if wanted == LM_HEAD else wanted.partition(".")[2]
    for tensor in unknown:
        if tensor == name or tensor.endswith(f".{name}"):
            prefix = tensor.removesuffix(name)
            whose = next(whose for key, whose in WRAPPERS.items() if key in prefix) if prefix else FOREIGN["headless"]
            raise UserError(f"{folder}: has tensor {tensor} in place of {wanted}: {whose}")


def _names(file: Path) -> set[str]:
    with opened(file) as tensors:
        return {name for name in tensors.keys() if not name.endswith(BUFFERS)}  # noqa: SIM118


def _places(index: Path) -> dict[str, str]:
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: weight_map is missing, which says where tensors are; download the file again")
    for tensor, name in places.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: weight_map: tensor {tensor} is in {name!r}, which is no file's name")
    return {tensor: name for tensor, name in places.items() if not tensor.endswith(BUFFERS)}


def _instead(folder: Path) -> str:
    """The existing files with weights, and the remedy."""
    names = sorted(path.name for path in folder.iterdir())
    for pattern, remedy in OTHERS.items():
        if matches := [name for name in names if fnmatch(name, pattern)]:
            return f"{matches[0]} is {remedy}"
    return "complete the download, or begin with random ones: galvatron train --continue_training 0"
