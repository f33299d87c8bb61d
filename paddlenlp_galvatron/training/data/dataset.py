"""One Megatron-compatible data set: its two files, and its samples, pass after pass.

`prefix.bin` has tokens, `prefix.idx` how many each document. The files are others': nothing in them is used before
it is checked.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...base.file_kind import kind_of
from ...base.reading import LargeFile
from .sample_index import FOLDER, Arrays, SampleIndex, build_index, cached_arrays

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of a token, documents, entries of Megatron's own list of them
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
NOT_WHOLE = (6, 7)  # types of floating-point numbers
SAMPLED_BLOCKS = 16  # of the tokens, by which others are known: data sets have terabytes
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SEEDS = 2**32  # numpy takes smaller ones


def dataset_files(prefix: Path) -> tuple[Path, Path]:
    """Paths of the tokens and of their index. Raises UserError: the prefix has no name."""
    if not prefix.name:
        raise UserError(f"{prefix}: is a folder; give the path of a data set, such as data/mine, without .bin and .idx")
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


class TokenFiles:
    """A data set that stays as it was when it was opened, or says that it has changed."""

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
        # The content of the data, wherever they are.
        self.identity = {
            "bin_bytes": self._tokens.size_bytes,
            "bin_crc32": self._tokens.checksum(SAMPLED_BLOCKS),
            "idx_bytes": self._index.size_bytes,
            "idx_crc32": self._index.checksum(),
        }

    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each document; they stand one after another in the `.bin`. Raises UserError for any other index."""
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
        """Tokens from a place on, counted in tokens. Raises UserError: the data have changed, or cannot be read."""
        width = self._type.itemsize
        content = self._tokens.read(first * width, count * width)
        return np.frombuffer(content, self._type).astype(np.int64)

    def require_unchanged(self) -> None:
        """Raise UserError where another content was written into the file of tokens: samples would be cut wrongly."""
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
    So a sample depends on the arguments and its number alone, not on how long the training runs.

    Every rank may open the same data at once, before or after Paddle's parallel environment.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, split: Split, shares: str, keep: bool = True):
        """`shares` divides the documents into train, valid and test. `keep`: keep the order next to the data. Raises
        UserError."""
        self.prefix = Path(prefix).absolute()
        self._seq_length, self._seed, self._split, self._keep = seq_length, seed, split, keep
        _require_share(split, shares)
        self._files = TokenFiles(self.prefix)
        self.documents, self.tokens = self._files.documents, self._files.tokens  # of all splits
        self.identity = self._files.identity
        edges = split_edges(shares, self.documents)
        self._first, self._end = edges[SPLITS.index(split)], edges[SPLITS.index(split) + 1]
        self._passes: dict[int, SampleIndex] = {}
        self.samples = len(self._pass(0))  # of one pass over the split

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens [seq_length + 1] of a sample, counted from 0 through all passes. Raises UserError: the data have
        changed, or cannot be read."""
        self._files.require_unchanged()
        pass_number, index = divmod(number, self.samples)
        stretches = self._pass(pass_number).stretches(index, self._seq_length + 1)
        return np.concatenate([self._files.read(start, count) for start, count in stretches])

    def _pass(self, number: int) -> SampleIndex:
        opened = self._passes.get(number)
        if opened is None:
            opened = self._open_pass(number)
            self._passes = {number: opened}  # samples continue in order: one is enough
        return opened

    def _open_pass(self, number: int) -> SampleIndex:
        seed = (self._seed + number) % SEEDS
        made_from = {"documents": [self._first, self._end], "seq_length": self._seq_length, "seed": seed}
        folder, origin = self.prefix.parent / FOLDER, self.identity | made_from
        return SampleIndex(*cached_arrays(folder, self._files.owner, origin, lambda: self._build(seed), self._keep))

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
    """Where the splits begin and end among the documents, by the rule of PaddleNLP's get_train_valid_test_split_,
    whose import takes seconds: each split has its share, rounded, and the first one the remainder."""
    values = [float(share) for share in shares.split("," if "," in shares else "/")]
    ends = np.cumsum([round(value / sum(values) * documents) for value in values]).tolist()
    edges = [0, *ends, *[ends[-1]] * (len(SPLITS) - len(ends))]
    return [max(0, edge + documents - edges[-1]) if index else 0 for index, edge in enumerate(edges)]


def _require_share(split: Split, shares: str) -> None:
    """Raise UserError unless the shares read as PaddleNLP reads them, and leave the split any documents."""
    try:
        values = [float(share) for share in shares.split("," if "," in shares else "/")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= len(SPLITS) or min(values) < 0 or not 0 < sum(values) < math.inf:
        raise UserError(f'split: "{shares}" is not three shares such as "949,50,1"')
    if not dict(zip(SPLITS, values, strict=False)).get(split):
        raise UserError(f'split: "{shares}" leaves the {split} split no documents; give it a share')
