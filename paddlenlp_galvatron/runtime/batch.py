"""The runtime's global batch. Needs no Paddle, so that data are checked before Paddle is imported."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

IGNORED_LABEL = -100  # PaddleNLP's mark of a position that has no loss
Tokens = np.ndarray[Any, np.dtype[np.int64]]


class Samples(NamedTuple):
    """Rows of a global batch, each part [rows, S]."""

    ids: Tokens
    labels: Tokens  # IGNORED_LABEL: none
    ends: Tokens | None = None  # for each token the position behind its document; None: a row is one document


Batch = Tokens | tuple[Tokens, Tokens] | Samples  # or [rows, S + 1], of which labels are one to the right


def samples_of(batch: Batch) -> Samples:
    """The parts of a batch."""
    return Samples(*batch) if isinstance(batch, tuple) else Samples(batch[:, :-1], batch[:, 1:])
