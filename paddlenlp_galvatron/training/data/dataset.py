"""One Megatron-compatible data set: its two files, and its samples, pass after pass.

`prefix.bin` has the tokens, `prefix.idx` the length of each document. The files are untrusted: everything is checked
before use.

The tokens of each sample of a pass follow PaddleNLP's order, computed once and cached next to the data. Cache files
hold plain arrays and their origin: sizes and checksums of the data, no names or times. A cache file that is damaged,
another user's or of another origin is ignored.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...base.file_kind import kind_of
from ...base.reading import LargeFile, read_json
from ...base.writing import locked, whole_file, write_text

FOLDER = ".galvatron-index"  # next to the data
LONGEST_WAIT_S = 600.0  # wait for another process to make an index: minutes for billions of documents
NUMBER = np.dtype("<i8")
Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]  # arrays of a SampleIndex


class StoredRows:
    """An array [rows, columns] of integers in a .npy file; reads only requested rows."""

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
        """Raises UserError if the rows do not exist or cannot be read."""
        first, count = int(rows.start), int(rows.stop - rows.start)
        content = self._file.read(self._begin + first * self._row_bytes, count * self._row_bytes)
        return np.frombuffer(content, NUMBER).reshape(count, self._columns)


@dataclass(frozen=True)
class SampleIndex:
    """The order of one pass, in memory or in files."""

    samples: NDArray[np.int64] | StoredRows  # [samples, 3]: first and last document, first token in the former
    documents: NDArray[np.int64] | StoredRows  # [documents, 2], shuffled: offset in the `.bin` and length, in tokens

    def __len__(self) -> int:
        return len(self.samples)

    def stretches(self, sample: int, length: int) -> Iterator[tuple[int, int]]:
        """The place of a sample of `length` tokens: offsets in the `.bin` and numbers of tokens. Raises UserError."""
        first, last, begin = self.samples[sample : sample + 1][0].tolist()
        for start, count in self.documents[first : last + 1].tolist():
            taken = min(count - begin, length)
            yield start + begin, taken
            length, begin = length - taken, 0


def build_index(sizes: NDArray[np.int64], first: int, end: int, seq_length: int, seed: int) -> Arrays:
    """One pass over the documents `first` to `end` of `sizes` tokens, as PaddleNLP's GPTDataset shuffles one epoch.

    The shuffled documents form one stream of tokens. Sample k is its `seq_length` + 1 tokens from k * seq_length on.
    Then the samples are shuffled.
    """
    random = np.random.RandomState(seed)
    shuffled = np.arange(first, end)
    random.shuffle(shuffled)
    places, counts = (sizes.cumsum() - sizes)[shuffled], sizes[shuffled]
    ends = counts.cumsum()
    count = int(ends[-1] - 1) // seq_length
    begins = np.arange(count + 1) * seq_length  # offsets of samples in the stream, and the end of the last
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
    """Arrays [rows, columns] cached in a folder of this user or of `owner`; else new arrays, cached there if possible
    and with `keep`.

    `made_from`: their origin; JSON. Only one of several processes builds. Raises the errors of `build`.
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
    with suppress(UserError), locked(folder, wait_s=LONGEST_WAIT_S):  # without a lock or disk space it stays in memory
        if not cached():
            write_cache(folder / name, made_from, *build())
    with suppress(OSError):
        folder.rmdir()  # removes an unused cache folder
    return cached() or build()


def _is_trusted(folder: Path, owner: int) -> bool:
    """Whether only this user, or the owner of the data, can have written here."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    others_write = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(state.st_mode) and state.st_uid in (os.geteuid(), owner) and not others_write


def write_cache(path: Path, made_from: Mapping[str, Any], *arrays: NDArray[np.int64]) -> None:
    """Cache arrays next to their sources. Raises UserError."""
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
    """The rows from `write_cache`, if they exist, are whole and have this origin."""
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


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of a token, documents, entries of Megatron's own list of them
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
NOT_WHOLE = (6, 7)  # types of floating-point numbers
SAMPLED_BLOCKS = 16  # blocks of tokens in the checksum: data sets have terabytes
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SEEDS = 2**32  # numpy's limit of seeds


def dataset_files(prefix: Path) -> tuple[Path, Path]:
    """Paths of the tokens and of their index. Raises UserError: the prefix has no name."""
    if not prefix.name:
        raise UserError(f"{prefix}: is a folder; give the path of a data set, such as data/mine, without .bin and .idx")
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


class TokenFiles:
    """The files of a data set; detects changes after opening."""

    def __init__(self, prefix: Path):
        """Raises UserError."""
        bin_file, idx_file = dataset_files(prefix)
        try:
            self._tokens, self._index = LargeFile(bin_file), LargeFile(idx_file)
        except UserError as error:
            hint = "give the data set's path without .bin or .idx (galvatron data prepare)"
            raise UserError(f"{error}; {hint}") from None
        self._type, self.documents = _header(self._index)
        self.tokens = self._tokens.size_bytes // self._type.itemsize
        self.owner = self._index.state().st_uid
        self._seen = self._tokens.state()
        # Identity of the data's content, independent of paths.
        self.identity = {
            "bin_bytes": self._tokens.size_bytes,
            "bin_crc32": self._tokens.checksum(SAMPLED_BLOCKS),
            "idx_bytes": self._index.size_bytes,
            "idx_crc32": self._index.checksum(),
        }

    def sizes(self) -> NDArray[np.int64]:
        """Lengths of the documents, which are contiguous in the `.bin`. Raises UserError for any other index."""
        count, width = self.documents, self._type.itemsize
        content = self._index.read(HEADER.size, self._index.size_bytes - HEADER.size)
        sizes = np.frombuffer(content, "<i4", count).astype(np.int64)
        places = np.frombuffer(content, "<i8", count, 4 * count)
        entries = np.frombuffer(content, "<i8", offset=12 * count)
        if (sizes < 0).any():
            self._refuse(f"document {(sizes < 0).argmax()} has less than 0 tokens")
        ends = sizes.cumsum()
        tokens = int(ends[-1]) if count else 0
        if self._tokens.size_bytes != tokens * width:
            raise UserError(
                f"{self._tokens.path}: has {self._tokens.size_bytes:,} bytes where {self._index.path.name} counts "
                f"{tokens:,} tokens of {width} bytes; is a file cut off? Prepare the data again"
            )
        apart = places != (ends - sizes) * width
        if apart.any():
            self._refuse(f"document {apart.argmax()} does not begin where the one before ends")
        if len(entries) and (entries[0] < 0 or entries[-1] > count or (entries[1:] < entries[:-1]).any()):
            self._refuse("its list of documents does not go from 0 to their number")
        return sizes

    def _refuse(self, fault: str) -> NoReturn:
        raise UserError(f"{self._index.path}: {fault}; prepare the data again")

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens from an offset in tokens. Raises UserError if the data have changed or cannot be read."""
        width = self._type.itemsize
        content = self._tokens.read(first * width, count * width)
        return np.frombuffer(content, self._type).astype(np.int64)

    def require_unchanged(self) -> None:
        """Raise UserError if the file of tokens was overwritten, as samples would be cut wrongly."""
        now = self._tokens.state()
        if (now.st_size, now.st_mtime_ns) == (self._seen.st_size, self._seen.st_mtime_ns):
            return
        if self._tokens.checksum(SAMPLED_BLOCKS) != self.identity["bin_crc32"]:
            raise UserError(
                f"{self._tokens.path}: has changed since it was opened; start again, and leave the data alone "
                "during a run"
            )
        self._seen = now


def _header(index: LargeFile) -> tuple[np.dtype[Any], int]:
    """Type of a token and number of documents. Raises UserError."""
    head = index.read(0, min(index.size_bytes, HEADER.size))
    fault = "not a Megatron index (mmap), or cut off; prepare the data again"
    if not head.startswith(MAGIC):
        if kind := kind_of(head):
            fault = f"not a Megatron index (mmap): it {kind.fault}; prepare the data again"
    elif len(head) == HEADER.size:
        _, version, code, documents, entries = HEADER.unpack(head)
        beyond = index.size_bytes - HEADER.size - 12 * documents - 8 * entries
        if version == VERSION and code in TYPES and beyond == 0:
            return np.dtype(TYPES[code]), documents
        if version != VERSION:
            fault = f"is a Megatron index of version {version}, not {VERSION}; prepare the data again"
        elif code in NOT_WHOLE:
            fault = "its tokens are no whole numbers; prepare the data again"
        elif beyond == documents > 0:  # Megatron-LM appends a mode, one byte, for each sequence
            fault = "is the index of multimodal data, which are not supported; prepare the text alone"
    raise UserError(f"{index.path}: {fault}")


class DataSet:
    """A split of a data set, in the order of PaddleNLP's causal dataset.

    Sample n is PaddleNLP's with the same seed; a next pass over the data is shuffled by seed + 1, and so on.
    So a sample depends only on the arguments and its number, not on the length of the training.

    All ranks may open the same data at once, before or after Paddle's parallel environment starts.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, split: Split, shares: str, keep: bool = True):
        """`shares` divides the documents into train, valid and test. `keep`: keep the order next to the data. Raises
        UserError."""
        self.prefix = Path(prefix).absolute()
        self._seq_length, self._seed, self._split, self._keep = seq_length, seed, split, keep
        _require_share(split, shares)
        self._files = TokenFiles(self.prefix)
        self.documents, self.tokens = self._files.documents, self._files.tokens  # documents and tokens of all splits
        self.identity = self._files.identity
        edges = split_edges(shares, self.documents)
        self._first, self._end = edges[SPLITS.index(split)], edges[SPLITS.index(split) + 1]
        self._passes: dict[int, SampleIndex] = {}
        self.samples = len(self._pass(0))  # samples of one pass over the split

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens [seq_length + 1] of a sample, counted from 0 through all passes. Raises UserError if the data have
        changed or cannot be read."""
        self._files.require_unchanged()
        pass_number, index = divmod(number, self.samples)
        stretches = self._pass(pass_number).stretches(index, self._seq_length + 1)
        return np.concatenate([self._files.read(start, count) for start, count in stretches])

    def _pass(self, number: int) -> SampleIndex:
        if number not in self._passes:
            seed = (self._seed + number) % SEEDS
            made_from = {"documents": [self._first, self._end], "seq_length": self._seq_length, "seed": seed}
            folder, origin = self.prefix.parent / FOLDER, self.identity | made_from
            arrays = cached_arrays(folder, self._files.owner, origin, lambda: self._build(seed), self._keep)
            self._passes = {number: SampleIndex(*arrays)}  # samples are read in order: one pass is enough
        return self._passes[number]

    def _build(self, seed: int) -> Arrays:
        sizes = self._files.sizes()
        tokens = int(sizes[self._first : self._end].sum())
        if tokens <= self._seq_length:
            raise UserError(
                f"{self.prefix}: the {self._split} split ({max(0, self._end - self._first)} of {self.documents} "
                f"documents) holds {tokens} tokens, less than one sample of {self._seq_length} + 1; give more text, "
                "another split or a shorter seq_length"
            )
        return build_index(sizes, self._first, self._end, self._seq_length, seed)


def split_edges(shares: str, documents: int) -> list[int]:
    """First and last document of the splits, by the rule of PaddleNLP's get_train_valid_test_split_ (not imported, as
    that takes seconds): each split has its rounded share, the first one the remainder."""
    values = [float(share) for share in shares.split("," if "," in shares else "/")]
    ends = np.cumsum([round(value / sum(values) * documents) for value in values]).tolist()
    edges = [0, *ends, *[ends[-1]] * (len(SPLITS) - len(ends))]
    return [max(0, edge + documents - edges[-1]) if index else 0 for index, edge in enumerate(edges)]


def _require_share(split: Split, shares: str) -> None:
    """Raise UserError unless the shares are valid for PaddleNLP and give the split at least one document."""
    try:
        values = [float(share) for share in shares.split("," if "," in shares else "/")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= len(SPLITS) or min(values) < 0 or not 0 < sum(values) < math.inf:
        raise UserError(f'split: "{shares}" is not three shares such as "949,50,1"')
    if not dict(zip(SPLITS, values, strict=False)).get(split):
        raise UserError(f'split: "{shares}" leaves the {split} split no documents; give it a share')
