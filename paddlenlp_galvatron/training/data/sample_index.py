"""Which tokens each sample of a pass over a data set has: PaddleNLP's order, worked out once and kept next to the data.

The files hold plain arrays and their origin: sizes and checksums of the data, never names or times. A file that is
damaged, another user's or of another origin is not used.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...base.locking import locked
from ...base.reading import LargeFile, read_json
from ...base.writing import whole_file, write_text

FOLDER = ".galvatron-index"  # next to the data
LONGEST_WAIT_S = 600.0  # for another process that makes an index: minutes for billions of documents
NUMBER = np.dtype("<i8")
Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]  # arrays of a SampleIndex


class StoredRows:
    """An array [rows, columns] of whole numbers in a .npy file, read where it is requested."""

    def __init__(self, path: Path, rows: int, columns: int):
        """Raises UserError for any other file."""
        self._file = LargeFile(path)
        self._rows, self._columns, self._row_bytes = rows, columns, columns * NUMBER.itemsize
        header = BytesIO()
        description = {"descr": NUMBER.str, "fortran_order": False, "shape": (rows, columns)}
        np.lib.format.write_array_header_1_0(header, description)  # type: ignore[no-untyped-call]
        self._begin = header.tell()
        size_bytes = self._begin + rows * self._row_bytes
        if self._file.size_bytes != size_bytes or self._file.read(0, self._begin) != header.getvalue():
            raise UserError(f"{path}: is no array of {rows} by {columns} whole numbers")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> NDArray[np.int64]:
        """Raises UserError: there are no such rows, or they cannot be read."""
        first, count = int(rows.start), int(rows.stop - rows.start)
        content = self._file.read(self._begin + first * self._row_bytes, count * self._row_bytes)
        return np.frombuffer(content, NUMBER).reshape(count, self._columns)


@dataclass(frozen=True)
class SampleIndex:
    """The order of one pass, in memory or in files."""

    samples: NDArray[np.int64] | StoredRows  # [samples, 3]: first and last document, first token in the former
    documents: NDArray[np.int64] | StoredRows  # [documents, 2], as shuffled: place in the `.bin` and length, in tokens

    def __len__(self) -> int:
        return len(self.samples)

    def stretches(self, sample: int, length: int) -> Iterator[tuple[int, int]]:
        """Where a sample of `length` tokens stands: places in the `.bin` and numbers of tokens. Raises UserError."""
        first, last, begin = self.samples[sample : sample + 1][0].tolist()
        for start, count in self.documents[first : last + 1].tolist():
            taken = min(count - begin, length)
            yield start + begin, taken
            length, begin = length - taken, 0


def build_index(sizes: NDArray[np.int64], first: int, end: int, seq_length: int, seed: int) -> Arrays:
    """One pass over the documents `first` to `end` of `sizes` tokens, as PaddleNLP's GPTDataset shuffles one epoch.

    The documents, shuffled, make one stream of tokens. Sample k has `seq_length` + 1 tokens of it from k * seq_length
    on. Then the samples are shuffled.
    """
    random = np.random.RandomState(seed)
    shuffled = np.arange(first, end)
    random.shuffle(shuffled)
    places, counts = (sizes.cumsum() - sizes)[shuffled], sizes[shuffled]
    ends = counts.cumsum()
    count = int(ends[-1] - 1) // seq_length
    begins = np.arange(count + 1) * seq_length  # in the stream; the last is where the last sample ends
    holding = ends.searchsorted(begins, side="right")  # the document that has that token
    within = begins - (ends - counts)[holding]
    order = np.arange(count)
    random.shuffle(order)
    samples = np.stack((holding[order], holding[order + 1], within[order]), axis=1)
    return samples, np.stack((places, counts), axis=1)


def cached_arrays(
    folder: Path,
    owner: int,
    made_from: Mapping[str, Any],
    build: Callable[[], Sequence[NDArray[np.int64]]],
    keep: bool = True,
) -> Sequence[NDArray[np.int64] | StoredRows]:
    """Arrays [rows, columns] that are kept in a folder of this user or of `owner`; else new ones, kept there where that
    can be, and with `keep`.

    `made_from`: their origin; JSON. One of several processes builds. Raises the errors of `build`.
    """
    if keep:
        with suppress(OSError):
            folder.mkdir(mode=0o755, exist_ok=True)
    if not _is_trusted(folder, owner):
        return build()
    name = sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
    cached = partial(read_cache, folder / name, made_from)
    if arrays := cached():
        return arrays
    if not keep:
        return build()
    with suppress(UserError), locked(folder, wait_s=LONGEST_WAIT_S):  # without a lock or room it is kept in memory
        if not cached():
            write_cache(folder / name, made_from, *build())
    with suppress(OSError):
        folder.rmdir()  # if nothing could be kept
    return cached() or build()


def _is_trusted(folder: Path, owner: int) -> bool:
    """Whether only this user, or who may write the data anyway, can have written here."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    others_write = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(state.st_mode) and state.st_uid in (os.geteuid(), owner) and not others_write


def write_cache(path: Path, made_from: Mapping[str, Any], *arrays: NDArray[np.int64]) -> None:
    """Write arrays next to their sources. Raises UserError."""
    files = [_file(path, number) for number in range(len(arrays))]
    for file, array in zip(files, arrays, strict=True):
        with whole_file(file) as opened:
            np.save(opened, np.ascontiguousarray(array, NUMBER), allow_pickle=False)
    description = {
        "made_from": made_from,
        "shapes": [list(array.shape) for array in arrays],
        "crc32": [LargeFile(file).checksum() for file in files],
    }
    write_text(path, json.dumps(description) + "\n")


def read_cache(path: Path, made_from: Mapping[str, Any]) -> list[StoredRows] | None:
    """The rows that `write_cache` wrote, if they are there, whole, and of this origin."""
    try:
        description = read_json(path)
        shapes = [(int(rows), int(columns)) for rows, columns in description["shapes"]]
        files = [_file(path, number) for number in range(len(shapes))]
        arrays = [StoredRows(file, *shape) for file, shape in zip(files, shapes, strict=True)]
        checksums = [LargeFile(file).checksum() for file in files]
    except (UserError, ValueError, TypeError, LookupError):
        return None
    whole = {"made_from": made_from, "shapes": [list(shape) for shape in shapes], "crc32": checksums}
    return arrays if description == whole else None


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}.npy")
