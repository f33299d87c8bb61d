"""A data set of the user's own: any object with a length and items by number, as PaddleNLP's Trainer takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...runtime.batch import IGNORED_LABEL, Samples
from ..data.source import InPasses

Tokens = NDArray[np.int64]
Collator = Callable[[list[Any]], Mapping[str, Any]]
KEYS = {"input_ids", "labels", "attention_mask"}
WHOLE = "text"  # PaddleNLP's pretraining data sets call inputs and labels together so


class MapData(InPasses):
    """Global batches of a map-style data set, in the order that `InPasses` says."""

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
            global_batch,
            {"data": f"{name} {type(dataset).__name__} of {len(dataset)}", "seq_length": seq_length},
            shuffle,
        )
        self._name, self._dataset, self._collator = name, dataset, collator
        self._seq_length, self._vocab_size = seq_length, vocab_size

    @property
    def samples(self) -> int:
        return len(self._dataset)

    def _batch(self, indices: Sequence[int]) -> Samples:
        """Raises UserError: they are no such tokens."""
        if not indices:
            nothing = np.empty((0, self._seq_length), np.int64)
            return Samples(nothing, nothing)
        items = [self._dataset[index] for index in indices]
        if self._collator is None:
            rows = [
                self._row(item, f"{self._name}[{index}]", self._seq_length)
                for index, item in zip(indices, items, strict=True)
            ]
            return Samples(*map(np.stack, zip(*rows, strict=True)))
        where = f"data_collator, of {self._name}[{indices[0]}] and others"
        return Samples(*self._row(self._collator(items), where, len(items), self._seq_length))

    def _row(self, item: Any, where: str, *shape: int) -> tuple[Tokens, Tokens]:
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
        else:  # the last token predicts nothing
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
        """Raise UserError for an id that is no token of the model."""
        learnt = labels[labels != IGNORED_LABEL]
        for key, tokens in (("input_ids", ids), ("labels", learnt)):
            wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if wrong.size:
                raise UserError(f"{where}: {key} has token {wrong[0]}, but the model's are 0-{self._vocab_size - 1}")


def sample_length(dataset: Any) -> int | None:
    """Sequence length of a data set, by its first item; None: it does not say."""
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
