"""Traffic of turning one token layout into another, by the intervals that each rank has and needs."""

from __future__ import annotations

from functools import lru_cache
from math import gcd, lcm, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan.layout import Cut, TokenLayout


class LayoutTraffic(NamedTuple):
    """Traffic of one resharding; all of it stays inside blocks of `span` consecutive ranks."""

    span: int
    most_tokens: int  # the most that a rank receives
    all_tokens: int  # the sum over all ranks


def redistribution(source: TokenLayout, target: TokenLayout, tokens: int, samples: int | None = None) -> LayoutTraffic:
    """Tokens that move when `tokens` of a micro-batch, so many samples, go from one layout to the other (as
    `plan.layout.moves` does)."""
    times = _repeated(source, target, samples)
    span, most, total = _moved(source, target, tokens // times, samples and samples // times)
    return LayoutTraffic(span, times * most, times * total)


@lru_cache(maxsize=100_000)
def _moved(source: TokenLayout, target: TokenLayout, tokens: int, samples: int | None) -> LayoutTraffic:
    if source == target:
        return LayoutTraffic(1, 0, 0)
    span = lcm(_block(source), _block(target))
    blocks = gcd(_blocks(source), _blocks(target), tokens, samples or 0)
    if blocks > 1:
        inner = _first_of(source, blocks), _first_of(target, blocks)
        traffic = redistribution(*inner, tokens // blocks, samples and samples // blocks)
        return LayoutTraffic(span, traffic.most_tokens, blocks * traffic.all_tokens)
    received = _laid(target, tokens, samples).of_rank - _kept(frozenset((source, target)), tokens, samples)
    return LayoutTraffic(span, int(received.max()), int(received.sum()))


def _blocks(layout: TokenLayout) -> int:
    """Blocks of consecutive ranks that each hold their own part of the tokens, cut alike."""
    parts, stride, mirrored = layout.cuts[0] if layout.cuts else (1, 1, False)
    return parts if parts * stride == layout.size and not mirrored else 1


def _first_of(layout: TokenLayout, blocks: int) -> TokenLayout:
    """The layout of the first of so many blocks."""
    (parts, stride, mirrored), *finer = layout.cuts
    coarsest = [Cut(parts // blocks, stride, mirrored)] if parts > blocks else []
    return TokenLayout(layout.size // blocks, (*coarsest, *finer))


def _repeated(source: TokenLayout, target: TokenLayout, samples: int | None) -> int:
    """How often the samples make the same moves: every rank then takes so many in a row as it would take one."""
    if samples is None:
        return 1
    apart = lcm(*(prod(cut.parts for cut in layout.cuts if not cut.mirrored) for layout in (source, target)))
    return samples // apart if samples % apart == 0 else 1


@lru_cache(maxsize=100_000)
def _kept(layouts: frozenset[TokenLayout], tokens: int, samples: int | None) -> NDArray[np.int64]:
    """Tokens that each rank holds in both of two layouts."""
    held, wanted = (_laid(layout, tokens, samples) for layout in layouts)
    kept = held.before(wanted.stops) - held.before(wanted.starts)
    return np.bincount(wanted.starts // tokens, weights=kept, minlength=len(wanted.of_rank)).astype(np.int64)


class _Laid(NamedTuple):
    """Tokens of all ranks of a layout, one rank's after the other's; each [intervals], rising."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    sums: NDArray[np.int64]  # tokens up to each stop
    of_rank: NDArray[np.int64]  # all of each one's tokens

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens held in front of each place."""
        last = np.searchsorted(self.starts, places, "right") - 1  # interval that begins there or in front
        return np.where(last < 0, 0, self.sums[last] - np.maximum(self.stops[last] - places, 0))


@lru_cache(maxsize=1000)
def _laid(layout: TokenLayout, tokens: int, samples: int | None) -> _Laid:
    intervals = layout.intervals(tokens, samples)
    of_rank: NDArray[np.int64] = (intervals[..., 1] - intervals[..., 0]).sum(1)
    intervals = intervals + tokens * np.arange(layout.size)[:, None, None]
    intervals = intervals[intervals[..., 0] < intervals[..., 1]]
    starts, stops = intervals.T.copy()
    return _Laid(starts, stops, np.cumsum(stops - starts), of_rank)


def _block(layout: TokenLayout) -> int:
    """Consecutive ranks within which the layout differs from that in which rank r holds the r-th of equal slices."""
    return layout.size // _blocks(layout)
