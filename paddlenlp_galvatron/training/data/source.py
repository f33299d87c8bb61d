"""Batches for training. A step's global batch is the same under every plan; each rank reads the rows it computes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fast_dataindex import helpers
from numpy.typing import NDArray

from ...base.errors import UserError, reported, within
from ...runtime.batch import IGNORED_LABEL, Batch, Samples
from .dataset import SPLITS, DataSet, Split

Rows = Callable[[int, Sequence[int]], Batch]  # some rows of a step's global batch
FIRST_BLOCK = 1 << 16  # samples of a blend that are ordered first; 10 bytes each


class BatchSource(ABC):
    """Source of training's tokens. A step's batch depends only on the source and the step."""

    def __init__(self, global_batch: int, identity: dict[str, Any]):
        """`identity`: everything that determines a sample besides its number; JSON."""
        self.global_batch, self.identity = global_batch, identity
        self._ahead = 0  # samples used before step 0 of this source; negative: earlier steps had smaller batches

    @abstractmethod
    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Tokens [rows, seq_length + 1] of some rows of a step's global batch, both counted from 0: inputs, and labels
        one to the right; or inputs and labels separately. Thread-safe."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the data before a run."""
        return []

    def pass_rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Like `rows`, for a single pass over the data."""
        return self.rows(step, rows)

    def batch(self, step: int) -> Batch:
        """All rows of a step's global batch."""
        return self.rows(step, range(self.global_batch))

    @property
    def samples(self) -> int | None:
        """Samples of one pass over the data; None: it has no end."""
        return None

    def first_sample(self, step: int) -> int:
        """Number of a step's first sample, as many as earlier steps used."""
        return self._ahead + step * self.global_batch

    def continue_at(self, step: int, sample: int) -> None:
        """Make a step begin at a sample, for any size of earlier batches."""
        self._ahead = sample - step * self.global_batch

    def position(self, step: int) -> dict[str, Any]:
        """The data's state in a checkpoint before a step; JSON."""
        return {"samples": self.first_sample(step), "global_batch": self.global_batch, "identity": self.identity}


class InPasses(BatchSource):
    """Samples by number, pass after pass without a gap.

    Pass p has all of them in the order of PaddleNLP's distributed sampler: shuffled by NumPy's RandomState(p), for
    any seed, plan and number of processes.
    """

    def __init__(self, global_batch: int, identity: dict[str, Any], shuffle: bool):
        super().__init__(global_batch, identity)
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._order_of)  # a batch may reach into the next pass

    @property
    @abstractmethod
    def samples(self) -> int: ...

    @abstractmethod
    def _batch(self, indices: Sequence[int]) -> Samples:
        """The samples of these numbers. Raises UserError."""

    def rows(self, step: int, rows: Sequence[int]) -> Samples:
        """Rows of a step's global batch. Raises UserError."""
        first = self.first_sample(step)
        return self._batch([self.index(first + row) for row in rows])

    def pass_rows(self, step: int, rows: Sequence[int]) -> Samples:
        """Rows of a single pass; rows beyond the last sample have no label."""
        present = [row for row in rows if self.first_sample(step) + row < self.samples]
        ids, labels, ends, pairs = self.rows(step, present)
        lacking = ((0, len(rows) - len(present)), (0, 0))  # missing columns are the last ones
        return Samples(
            np.pad(ids, lacking),
            np.pad(labels, lacking, constant_values=IGNORED_LABEL),
            None if ends is None else np.pad(ends, lacking, constant_values=ends.shape[-1]),
            None if pairs is None else np.pad(pairs, (*lacking, (0, 0))),
        )

    def index(self, number: int) -> int:
        """The sample of the data that has a number in the order of passes."""
        passed, position = divmod(number, self.samples)
        return int(self._order(passed)[position]) if self._shuffle else position

    def _order_of(self, passed: int) -> NDArray[np.int64]:
        order = np.arange(self.samples)
        np.random.RandomState(passed).shuffle(order)
        return order


class RandomData(BatchSource):
    """Uniform random tokens, for benchmarks."""

    def __init__(self, vocab_size: int, seq_length: int, global_batch: int, seed: int = 0, split: Split = "train"):
        super().__init__(
            global_batch, {"data": "random", "vocab_size": vocab_size, "seq_length": seq_length, "seed": seed}
        )
        self._vocab_size, self._shape = vocab_size, (global_batch, seq_length + 1)
        self._seed = seed, SPLITS.index(split)

    @property
    def notes(self) -> list[str]:
        return ["the tokens are random: this shows how fast a plan is, and teaches nothing"]

    def rows(self, step: int, rows: Sequence[int]) -> NDArray[np.int64]:
        random = np.random.default_rng([*self._seed, self.first_sample(step)])
        return random.integers(self._vocab_size, size=self._shape)[list(rows)]


class TrainingData(BatchSource):
    """A split of Megatron-compatible data: one data set, or several, blended by PaddleNLP's rule.

    As with PaddleNLP, a data set is named by its path without .bin and .idx; `weight path weight path ...` blends data
    sets; a folder blends those in it with equal weights.
    """

    def __init__(
        self,
        data: str | Path,
        seq_length: int,
        global_batch: int,
        seed: int = 0,
        split: Split = "train",
        shares: str = "949,50,1",
        vocab_size: int | None = None,
        keep: bool = True,
    ):
        """Open the data. `vocab_size`: refuse batches with larger tokens; `keep`: cache the order of samples next to
        the data. Raises UserError."""
        parts = parse_data(str(data))
        self._sets = [DataSet(entry.path, seq_length, seed, split, shares, keep) for entry in parts]
        self._weights = _shares([entry.weight for entry in parts])
        self._order = _blend(self._weights, FIRST_BLOCK) if len(parts) > 1 else None
        self._vocab_size, self._seq_length = vocab_size, seq_length
        self._step = "step" if split == "train" else f"{split} batch"  # word in messages
        described = [
            f"{weight:.6g} of {data_set.documents} documents with {data_set.tokens} tokens"
            for weight, data_set in zip(self._weights, self._sets, strict=True)
        ]
        super().__init__(
            global_batch,
            {
                "data": " + ".join(described),
                "checksums": " ".join(
                    f"{data_set.identity['idx_crc32']:08x}{data_set.identity['bin_crc32']:08x}"
                    for data_set in self._sets
                ),
                "split": shares,
                "seq_length": seq_length,
                "seed": seed,
            },
        )

    @property
    def samples(self) -> int:
        """Samples of one pass over every data set."""
        return sum(data_set.samples for data_set in self._sets)

    def rows(self, step: int, rows: Sequence[int]) -> NDArray[np.int64]:
        first = self.first_sample(step)
        with within(f"{self._step} {step}"):
            samples = [self._sample(first + row) for row in rows]
        return np.stack(samples) if samples else np.empty((0, self._seq_length + 1), np.int64)

    def _sample(self, number: int) -> NDArray[np.int64]:
        which, order = 0, self._order
        if order is not None:
            if number >= len(order.sets):
                self._order = order = _blend(self._weights, 1 << number.bit_length())
            which, number = int(order.sets[number]), int(order.samples[number])
        sample = self._sets[which].sample(number)
        for token in (sample.min(), sample.max()):
            if token < 0 or (self._vocab_size is not None and token >= self._vocab_size):
                raise UserError(
                    f"{self._sets[which].prefix}: holds token {token} but the model's vocab_size is "
                    f"{self._vocab_size}; prepare the data with the model's tokenizer"
                )
        return sample


class BlendPart(NamedTuple):
    """A data set of a blend."""

    weight: float
    path: Path  # path without .bin and .idx


def parse_data(data: str) -> list[BlendPart]:
    """Parses PaddleNLP's `input_dir`: a data set, a folder of them, or weights and paths. Raises UserError."""
    path, words = Path(data), data.split()
    with reported(f"data: {data}: cannot be read"):
        if path.is_dir():
            inside = [BlendPart(1.0, file.with_suffix("")) for file in sorted(path.glob("*.idx"))]
            if not inside:
                raise UserError(
                    f"{path}: the folder holds no data set (.bin and .idx); make one: galvatron data prepare"
                )
            return inside
        if len(words) == 1 or path.with_name(f"{path.name}.idx").is_file():
            return [BlendPart(1.0, path)]
    try:
        parts = [BlendPart(float(weight), Path(name)) for weight, name in zip(words[::2], words[1::2], strict=True)]
    except ValueError:
        parts = []
    if not parts or min(entry.weight for entry in parts) <= 0 or not np.isfinite(sum(entry.weight for entry in parts)):
        raise UserError(f'data: "{data}" is no weight above 0 before each data set, such as "0.7 a 0.3 b"')
    return parts


class _Order(NamedTuple):
    """The data set of each sample of a blend, and its number there."""

    sets: NDArray[np.int16]
    samples: NDArray[np.int64]


def _blend(weights: NDArray[np.float64], count: int) -> _Order:
    """The first samples of a blend, by the function of PaddleNLP's BlendableDataset: each comes from the data set
    furthest behind its share. More samples never change the order of these."""
    order = _Order(np.zeros(count, np.int16), np.zeros(count, np.int64))
    helpers.build_blending_indices(*order, weights, len(weights), count, False)
    return order


def _shares(weights: list[float]) -> NDArray[np.float64]:
    """Weights that add up to 1, rounded as PaddleNLP rounds them: it divides twice."""
    total = sum(weights)
    once: NDArray[np.float64] = np.array([weight / total for weight in weights])
    return np.divide(once, once.sum())
