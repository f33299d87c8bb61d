"""safetensors files: written one tensor in memory at a time, and opened with errors for people."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ...base.errors import UserError
from ...plan import Precision

DTYPES: dict[Precision, np.dtype[Any]] = {
    Precision.FP32: np.dtype(np.float32),
    Precision.FP16: np.dtype(np.float16),
    Precision.BF16: np.dtype(ml_dtypes.bfloat16),
}
CODES = {Precision.FP32: "F32", Precision.FP16: "F16", Precision.BF16: "BF16"}  # safetensors' names


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its numbers are requested when their turn comes."""

    key: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, np.dtype[np.float32]]]
    precision: Precision | None = None  # of its own; None: the file's


@dataclass(frozen=True)
class FileFacts:
    """A file's entry in a checkpoint's index, besides the list of its content."""

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
    """Write a file and bring it to disk; the library's own writer wants all tensors at once. `advance` receives the
    bytes that were written. `framework`: whose layout it is, in which readers believe.

    Raises OSError; UserError for numbers that the type cannot hold. Source of the format: safetensors' documentation.
    """
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": framework}}
    for tensor in tensors:
        stored_as = tensor.precision or precision
        end = offset + math.prod(tensor.shape) * DTYPES[stored_as].itemsize
        header[tensor.key] = {"dtype": CODES[stored_as], "shape": tensor.shape, "data_offsets": (offset, end)}
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
        stored = np.ascontiguousarray(array, DTYPES[precision])
    if precision is Precision.FP16 and not np.isfinite(stored).all() and np.isfinite(array).all():
        raise UserError(f"{tensor.key}: has numbers that fp16 cannot hold; choose bf16 or fp32")
    return stored.reshape(-1).view(np.uint8)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises UserError: it is missing or broken."""
    with naming(path), safe_open(path, framework="numpy") as file:
        yield file


def require_finite(array: np.ndarray[Any, Any], path: Path, tensor: str) -> None:
    """Raise UserError for weights that nothing can be trained from, or is to be computed with."""
    if not np.isfinite(array).all():
        raise UserError(f"{path}: tensor {tensor} has numbers that are NaN or infinite; take weights from before")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise UserError, with the file's name, where a safetensors file is found missing or broken."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; is it cut off, or not downloaded?") from None
