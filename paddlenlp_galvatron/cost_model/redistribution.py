"""What it takes to turn one token layout into another: by the intervals that each rank has and needs."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan.layout import TokenLayout


class LayoutTraffic(NamedTuple):
    """Traffic of one change of layout; all of it stays inside blocks of `span` consecutive ranks."""

    span: int
    most_tokens: int  # that a rank receives
    all_tokens: int  # that all ranks together receive


@lru_cache(maxsize=100_000)
def redistribution(source: TokenLayout, target: TokenLayout, tokens: int, samples: int | None = None) -> LayoutTraffic:
    """Tokens that move when `tokens` of a micro-batch, so many samples, go from one layout to the other (as
    `plan.layout.moves` does)."""
    if source == target:
        return LayoutTraffic(1, 0, 0)
    held, wanted = _laid(source, tokens, samples), _laid(target, tokens, samples)
    received = wanted.stops - wanted.starts - (held.before(wanted.stops) - held.before(wanted.starts))
    of_rank = np.bincount(wanted.starts // tokens, weights=received).astype(np.int64)
    return LayoutTraffic(lcm(_block(source), _block(target)), int(of_rank.max()), int(of_rank.sum()))


class _Laid(NamedTuple):
    """What all ranks of a layout hold, one rank's tokens after the other's; each [intervals], rising."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    sums: NDArray[np.int64]  # tokens up to each stop

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens held in front of each place."""
        last = np.searchsorted(self.starts, places, "right") - 1  # interval that begins there or in front
        return np.where(last < 0, 0, self.sums[last] - np.maximum(self.stops[last] - places, 0))


@lru_cache(maxsize=100)
def _laid(layout: TokenLayout, tokens: int, samples: int | None) -> _Laid:
    intervals = layout.intervals(tokens, samples) + tokens * np.arange(layout.size)[:, None, None]
    intervals = intervals[intervals[..., 0] < intervals[..., 1]]
    starts, stops = intervals.T.copy()
    return _Laid(starts, stops, np.cumsum(stops - starts))


def _block(layout: TokenLayout) -> int:
    """Consecutive ranks within which the layout differs from that in which rank r holds the r-th of equal slices."""
    parts, stride, mirrored = layout.cuts[0] if layout.cuts else (1, 1, False)
    return stride if parts * stride == layout.size and not mirrored else layout.size
