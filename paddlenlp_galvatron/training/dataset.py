"""One Megatron-compatible data set (`prefix.bin`, `prefix.idx`): its samples, pass after pass."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray
from paddlenlp.data import causal_dataset, indexed_dataset

from ..base.errors import UserError
from .corpus import dataset_files

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
CACHE = "index-cache"  # PaddleNLP's folder for index files, beside the data
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of a token, sequences, documents


class DataSet:
    """A split of a data set, shuffled by PaddleNLP's causal dataset.

    Sample n is what PaddleNLP gives with the same seed; a next pass over the data is shuffled by seed + 1, and so on.
    So a sample depends on the arguments and its number alone, not on how long the training runs.

    Every rank may open the same data at once, before or after Paddle's parallel environment: the first one builds
    PaddleNLP's index files, whole or not at all, and the others use them.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, split: Split, shares: str):
        """`shares` divides the documents into train, valid and test. Raises UserError."""
        self.prefix = Path(prefix).absolute()
        self.seq_length, self.seed = seq_length, seed
        self.split, self.shares = split, shares
        _require_share(split, shares)
        self._indexed = _open(self.prefix)
        self.documents = len(self._indexed.sizes)  # of all splits
        self.tokens = int(self._indexed.sizes.sum(dtype=np.int64))
        self._documents = self._documents_of_split()
        self._passes: dict[int, Any] = {}
        self.samples = len(self._pass(0))  # of one pass over the split

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens [seq_length + 1] of a sample, counted from 0 through all passes."""
        pass_number, index = divmod(number, self.samples)
        sample: NDArray[np.int64] = self._pass(pass_number)[index]["text"]
        return sample

    def _pass(self, number: int) -> Any:
        if number not in self._passes:
            self._passes = {number: self._open_pass(number)}  # samples go on in order: one is enough
        return self._passes[number]

    def _open_pass(self, number: int) -> Any:
        with _as_if_alone(), _locked(self.prefix) as cache, tempfile.TemporaryDirectory(dir=cache) as new:
            _drop_unusable(cache, self.prefix)
            dataset = causal_dataset.GPTDataset(
                self.split,
                str(self.prefix),
                self._documents,
                self._indexed,
                self.shares,
                1,  # samples wanted at least: gives the indices of exactly one pass
                self.seq_length,
                self.seed + number,
                data_cache_path=new,
            )
            # The description goes last: PaddleNLP builds anew unless all files are there.
            for file in sorted(Path(new).iterdir(), key=lambda file: file.suffix == ".dsc"):
                file.replace(cache / file.name)
        return dataset

    def _documents_of_split(self) -> NDArray[np.int32]:
        edges = causal_dataset.get_train_valid_test_split_(self.shares, self.documents)
        which = SPLITS.index(self.split)
        documents = np.arange(edges[which], edges[which + 1], dtype=np.int32)
        tokens = int(self._indexed.sizes[documents].sum(dtype=np.int64))
        if tokens <= self.seq_length:
            raise UserError(
                f"{self.prefix}: the {self.split} split ({len(documents)} of {self.documents} documents) holds "
                f"{tokens} tokens, less than one sample of {self.seq_length} + 1; give more text, another split or a "
                "shorter seq_length"
            )
        return documents


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


def _open(prefix: Path) -> Any:
    """PaddleNLP's reader of the token files. Raises UserError."""
    bin_file, idx_file = dataset_files(prefix)
    for file in (bin_file, idx_file):
        if not file.is_file():
            raise UserError(
                f"{file}: no such file; give the data set's path without .bin or .idx (galvatron data prepare)"
            )
    if not _is_index(idx_file):
        raise UserError(f"{idx_file}: not a Megatron index (mmap), or cut off; prepare the data again")
    with _as_if_alone():
        indexed = causal_dataset.get_indexed_dataset_(str(prefix), "mmap", skip_warmup=True)
    tokens = int(indexed.sizes.sum(dtype=np.int64))
    width = np.dtype(indexed._index.dtype).itemsize
    if bin_file.stat().st_size != tokens * width:
        raise UserError(
            f"{bin_file}: has {bin_file.stat().st_size} bytes where {idx_file.name} counts {tokens} tokens of {width} "
            "bytes; is a file cut off? Prepare the data again"
        )
    return indexed


def _is_index(file: Path) -> bool:
    """Whether an index is whole: its header, then size (int32) and place (int64) of each sequence, and first sequence
    (int64) of each document."""
    with file.open("rb") as opened:
        start = opened.read(INDEX_HEADER.size)
    if len(start) < INDEX_HEADER.size:
        return False
    magic, version, dtype, sequences, documents = INDEX_HEADER.unpack(start)
    known = magic == INDEX_MAGIC and version == 1 and dtype in indexed_dataset.dtypes
    return known and file.stat().st_size == INDEX_HEADER.size + 12 * sequences + 8 * documents


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Let PaddleNLP open data as a world of one, and drop what it prints.

    By itself it has the first rank of a node build, the others poll, and all meet at barriers, which need an
    initialised parallel environment. Here the processes take turns under a lock instead.
    """
    world_of_one = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    before = causal_dataset.paddle, causal_dataset.local_rank
    causal_dataset.paddle = SimpleNamespace(distributed=world_of_one, io=paddle.io)
    causal_dataset.local_rank = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), _silent():
            yield
    finally:
        causal_dataset.paddle, causal_dataset.local_rank = before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what C++ code prints to the standard output."""
    output = os.dup(1)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a path of ours
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextlib.contextmanager
def _locked(prefix: Path) -> Iterator[Path]:
    """The folder of index files, held by this process alone. The lock goes with the process that holds it."""
    cache = prefix.parent / CACHE
    try:
        cache.mkdir(exist_ok=True)
        lock = (cache / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{cache}: cannot be written: {error.strerror}; training keeps its index files there") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _drop_unusable(cache: Path, prefix: Path) -> None:
    """Drop descriptions of index files that are older than the data (PaddleNLP would use them) or cut off (it would
    wait for them)."""
    changed = dataset_files(prefix)[1].stat().st_mtime_ns
    for description in cache.glob("*.dsc"):
        if f"Data prefix {prefix}\n" not in description.read_text(encoding="utf-8"):
            continue
        if description.stat().st_mtime_ns < changed or not all(
            _is_whole(description.with_name(f"{description.stem}_{kind}_idx.npy"))
            for kind in ("doc", "sample", "shuffle")
        ):
            description.unlink()


def _is_whole(array: Path) -> bool:
    try:
        np.load(array, mmap_mode="r")
    except (OSError, ValueError):
        return False
    return True
