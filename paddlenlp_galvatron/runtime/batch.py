"""The runtime's global batch. Needs no Paddle, so that data are checked before Paddle is imported."""

from typing import Any, NamedTuple

import numpy as np

IGNORED_LABEL = -100  # PaddleNLP's mark of a position that has no loss
Tokens = np.ndarray[Any, np.dtype[np.int64]]
Facts = np.ndarray[Any, np.dtype[np.float32]]


class Samples(NamedTuple):
    """Rows of a global batch, each part [rows, S]."""

    ids: Tokens
    labels: Tokens  # IGNORED_LABEL: none
    ends: Tokens | None = None  # for each token the end of its document; None: a row is one document
    # Of rows whose documents are pairs, a chosen and a rejected answer, [rows, P, 4]: log-probabilities of both by the
    # reference, and the labels of both, 0 where a row has fewer pairs. A document after the pairs is padding.
    pairs: Facts | None = None


Batch = Tokens | tuple[Tokens, Tokens] | Samples  # Tokens: [rows, S + 1], labels shifted by one


def samples_of(batch: Batch) -> Samples:
    """The parts of a batch."""
    return Samples(*batch) if isinstance(batch, tuple) else Samples(batch[:, :-1], batch[:, 1:])


def behind(samples: Samples, seq_length: int) -> tuple[Tokens, Tokens]:
    """(ids, labels) one token further, for MTP, of rows of whole samples; no label where a document ends."""
    ids, labels = (values.reshape([-1, seq_length]) for values in samples[:2])
    further, of_further = (np.roll(values, -1, axis=1) for values in (ids, labels))
    last = np.zeros(ids.shape, bool)
    last[:, -1] = True
    if samples.ends is not None:
        ends = samples.ends.reshape(ids.shape)
        last[:, :-1] = ends[:, 1:] != ends[:, :-1]
    shape = samples.ids.shape
    return np.where(last, ids, further).reshape(shape), np.where(last, IGNORED_LABEL, of_further).reshape(shape)


def documents_of(ends: Tokens) -> Tokens:
    """The document of each token in its row [rows, S], from 0."""
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, 1:] != ends[:, :-1]
    return begins.cumsum(axis=1)
