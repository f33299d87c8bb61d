"""A data set of the user's own: whatever has a length and items by number, as PaddleNLP's Trainer takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import UserError
from ..runtime.stage import Batch
from ..runtime.vocabulary import IGNORED_LABEL
from .source import BatchSource

Tokens = NDArray[np.int64]
Collator = Callable[[list[Any]], Mapping[str, Any]]
KEYS = {"input_ids", "labels", "attention_mask"}
WHOLE = "text"  # PaddleNLP's pretraining data sets call inputs and labels together so


class MapData(BatchSource):
    """Global batches of a map-style data set.

    Pass p has all samples in the order of PaddleNLP's distributed sampler: shuffled by NumPy's RandomState(p), whatever
    the seed, the plan and the number of processes. Passes follow one another without a gap.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        seq_length: int,
        vocab_size: int,
        global_batch: int,
        collator: Collator | None = None,
        shuffle: bool = True,
    ):
        """`name`: of the argument, for errors. `collator`: makes a batch of items, as PaddleNLP's data_collator.
        Raises UserError: it has no length, or no items."""
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"{name}: a {type(dataset).__name__} has no length or no items by number; give a map-style data set "
                "(len(dataset) and dataset[number])"
            )
        if not len(dataset):
            raise UserError(f"{name}: is empty")
        super().__init__(
            global_batch, {"data": f"{name} {type(dataset).__name__} of {len(dataset)}", "seq_length": seq_length}
        )
        self._name, self._dataset, self._collator, self._shuffle = name, dataset, collator, shuffle
        self._seq_length, self._vocab_size = seq_length, vocab_size
        self._order = lru_cache(maxsize=2)(self._order_of)  # a batch may reach into the next pass

    @property
    def samples(self) -> int:
        return len(self._dataset)

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Inputs and labels [rows, seq_length] of a step. Raises UserError: they are no such tokens."""
        first = self.first_sample(step)
        return self._tokens([self._index(first + row) for row in rows])

    def last_rows(self, step: int, rows: Sequence[int]) -> Batch:
        """The same of a pass's samples alone: the rows that lack have no label."""
        there = [row for row in rows if self.first_sample(step) + row < self.samples]
        ids, labels = self.rows(step, there)
        lacking = ((0, len(rows) - len(there)), (0, 0))  # they are the last
        return np.pad(ids, lacking), np.pad(labels, lacking, constant_values=IGNORED_LABEL)

    def _index(self, number: int) -> int:
        passed, place = divmod(number, self.samples)
        return int(self._order(passed)[place]) if self._shuffle else place

    def _order_of(self, passed: int) -> Tokens:
        order = np.arange(self.samples)
        np.random.RandomState(passed).shuffle(order)
        return order

    def _tokens(self, indices: list[int]) -> Batch:
        if not indices:
            return np.empty((0, self._seq_length), np.int64), np.empty((0, self._seq_length), np.int64)
        items = [self._dataset[index] for index in indices]
        if self._collator is None:
            rows = [
                self._row(item, f"{self._name}[{index}]", self._seq_length)
                for index, item in zip(indices, items, strict=True)
            ]
            ids, labels = (np.stack([row[part] for row in rows]) for part in (0, 1))
        else:
            where = f"data_collator, of {self._name}[{indices[0]}] and others"
            ids, labels = self._row(self._collator(items), where, len(items), self._seq_length)
        return ids, labels

    def _row(self, item: Any, where: str, *shape: int) -> Batch:
        """Inputs and labels of a sample [S], or of a collated batch [samples, S]. Raises UserError."""
        fields = dict(item) if isinstance(item, Mapping) else {WHOLE: item}
        unknown = sorted(fields.keys() - KEYS - {WHOLE})
        if unknown:
            raise UserError(
                f"{where}: has {', '.join(unknown)}, which the plan's engine does not take; give input_ids and "
                "labels alone"
            )
        name = next((key for key in ("input_ids", WHOLE) if key in fields), None)
        if name is None:
            raise UserError(f"{where}: input_ids are missing; it has {', '.join(fields) or 'nothing'}")
        ids = _integers(fields[name], f"{where}: {name}")
        length = shape[-1]
        if "labels" in fields:
            labels = _integers(fields["labels"], f"{where}: labels")
        elif ids.shape == (*shape[:-1], length + 1):
            ids, labels = ids[..., :-1], ids[..., 1:]
        else:  # the last token has nothing to foretell
            end = np.full((*ids.shape[:-1], 1), IGNORED_LABEL)
            labels = np.concatenate([ids[..., 1:], end], axis=-1) if ids.ndim == len(shape) else ids
        for key, tokens in ((name, ids), ("labels", labels)):
            if tokens.shape != shape:
                raise UserError(
                    f"{where}: {key} has shape {tokens.shape} instead of {shape}; a sample has {length} tokens, or "
                    f"{length + 1} where it brings no labels"
                )
        self._require_tokens(ids, labels, where)
        if "attention_mask" in fields:
            _require_causal(fields["attention_mask"], labels, where)
        return ids, labels

    def _require_tokens(self, ids: Tokens, labels: Tokens, where: str) -> None:
        """Raise UserError for what is no token of the model."""
        known = labels[labels != IGNORED_LABEL]
        for key, tokens in (("input_ids", ids), ("labels", known)):
            wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if wrong.size:
                raise UserError(f"{where}: {key} has token {wrong[0]}, but the model's are 0-{self._vocab_size - 1}")


def sample_length(dataset: Any) -> int | None:
    """Tokens of a sample of a data set, by its first item; None: it does not say."""
    try:
        item = dataset[0]
        if isinstance(item, Mapping):
            item = item["input_ids"] if "labels" in item else item.get("input_ids", item.get(WHOLE))[1:]
            return len(item)
        return len(item) - 1
    except (TypeError, KeyError, IndexError):
        return None


def _integers(value: Any, where: str) -> Tokens:
    """Raises UserError."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except ValueError:  # rows of unlike length
        array = np.empty(0)
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{where}: is no array of integers")
    return array.astype(np.int64)


def _require_causal(mask: Any, labels: Tokens, where: str) -> None:
    """Raise UserError for a mask that is more than padding at the end, without labels: attention is causal anyway."""
    shown = _integers(mask, f"{where}: attention_mask")
    padded = shown == 0
    at_end = shown.shape == labels.shape and not (np.diff(padded.astype(np.int8), axis=-1) < 0).any()
    if not at_end or (labels[padded] != IGNORED_LABEL).any():
        raise UserError(
            f"{where}: attention_mask hides tokens that are no padding at the end with the label {IGNORED_LABEL}; "
            "attention "
            "is causal over the whole sample: leave the mask out"
        )
