"""One Megatron-compatible data set (`prefix.bin`, `prefix.idx`): its samples, pass after pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from .sample_index import FOLDER, Arrays, SampleIndex, build_index, kept_index
from .token_files import TokenFiles

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SEEDS = 2**32  # numpy takes smaller ones


class DataSet:
    """A split of a data set, in the order of PaddleNLP's causal dataset.

    Sample n is what PaddleNLP gives with the same seed; a next pass over the data is shuffled by seed + 1, and so on.
    So a sample depends on the arguments and its number alone, not on how long the training runs.

    Every rank may open the same data at once, before or after Paddle's parallel environment.
    """

    def __init__(self, prefix: str | Path, seq_length: int, seed: int, split: Split, shares: str):
        """`shares` divides the documents into train, valid and test. Raises UserError."""
        self.prefix = Path(prefix).absolute()
        self._seq_length, self._seed, self._split = seq_length, seed, split
        _require_share(split, shares)
        self._files = TokenFiles(self.prefix)
        self.documents, self.tokens = self._files.documents, self._files.tokens  # of all splits
        self.identity = self._files.identity
        from paddlenlp.data.causal_dataset import get_train_valid_test_split_  # here, as its import takes seconds

        edges = get_train_valid_test_split_(shares, self.documents)
        self._first, self._end = (max(0, edges[SPLITS.index(split) + side]) for side in (0, 1))
        self._passes: dict[int, SampleIndex] = {}
        self.samples = len(self._pass(0))  # of one pass over the split

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens [seq_length + 1] of a sample, counted from 0 through all passes. Raises UserError: the data have
        changed, or cannot be read."""
        self._files.require_unchanged()
        pass_number, index = divmod(number, self.samples)
        stretches = self._pass(pass_number).stretches(index, self._seq_length + 1)
        return np.concatenate([self._files.read(place, count) for place, count in stretches])

    def _pass(self, number: int) -> SampleIndex:
        opened = self._passes.get(number)
        if opened is None:
            opened = self._open_pass(number)
            self._passes = {number: opened}  # samples go on in order: one is enough
        return opened

    def _open_pass(self, number: int) -> SampleIndex:
        seed = (self._seed + number) % SEEDS
        made_from = {"documents": [self._first, self._end], "seq_length": self._seq_length, "seed": seed}
        return kept_index(
            self.prefix.parent / FOLDER, self._files.owner, self.identity | made_from, lambda: self._build(seed)
        )

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
