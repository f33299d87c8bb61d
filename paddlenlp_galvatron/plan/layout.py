"""Token layout: the tokens of a micro-batch on each rank of a stage, and resharding between layouts.

The tokens of one micro-batch, sample by sample, are numbered 0..N-1. They are cut in the order of the ranks, so all
layers with consecutive ranks and sharded tokens (dp, Megatron-SP and Ulysses of any degree) have one layout: no
resharding between them.

Ranks of context parallelism hold two chunks of each sample, equally far from its start and its end, so that causal
attention is balanced.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .mesh import SHARDING, STAGE, Axis
from .strategy import Strategy

# [ranks, intervals, 2]: first and last-plus-one token of the intervals that each rank holds, rising.
Intervals = NDArray[np.int64]


def own_chunks(index: int, degree: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last-plus-one token of the two chunks that rank `index` of `degree` holds of a sample's `length`."""
    size, last = length // (2 * degree), 2 * degree - 1
    return (index * size, (index + 1) * size), ((last - index) * size, (last - index + 1) * size)


def chunks_of_a_sample(axis: Axis, degree: int) -> int:
    """Equal chunks of each sample per context-parallel rank, held by its ranks along other axes together."""
    return 2 * degree if axis is Axis.CONTEXT and degree > 1 else degree


class Cut(NamedTuple):
    """Local rank r gets part r // stride % parts of its part after the previous cut."""

    parts: int
    stride: int
    mirrored: bool = False  # zigzag: a part is `own_chunks` of each sample


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tokens that each local rank of a stage holds at a layer's edge. Equal layouts are equal objects."""

    size: int  # ranks of the stage
    cuts: tuple[Cut, ...]  # coarsest first; at most one is mirrored, and the cuts before it separate samples

    def intervals(self, tokens: int, samples: int | None = None) -> Intervals:
        """Intervals of the micro-batch's `tokens` that each local rank holds. The tokens are `samples` of one length;
        mirrored (zigzag) chunks need the number of samples, and may be empty."""
        mirrored = next((mirrored for mirrored, cut in enumerate(self.cuts) if cut.mirrored), None)
        position, parts = self._parts(self.cuts[:mirrored])
        if mirrored is None:
            whole: Intervals = np.stack([position, position + 1], axis=1) * tokens // parts
            return whole[:, None]
        assert samples is not None, "a mirrored cut is of samples"
        degree, stride, _ = self.cuts[mirrored]
        length, each = tokens // samples, samples // parts
        size = length // (2 * degree)
        chunks = np.array([own_chunks(index, degree, length) for index in range(degree)])
        pairs = chunks[np.arange(self.size) // stride % degree, :, 0]  # [ranks, 2]
        # A finer cut splits a rank's chunks, concatenated.
        finer, shares = self._parts(self.cuts[mirrored + 1 :])
        kept = np.stack([finer, finer + 1], axis=1) * (2 * each * size) // shares
        count = min(-(-2 * each // shares) + 1, 2 * each)
        numbers = np.minimum(kept[:, :1] // max(size, 1), 2 * each - count) + np.arange(count)  # [ranks, count]
        starts = (position[:, None] * each + numbers // 2) * length + np.take_along_axis(pairs, numbers % 2, 1)
        edges: Intervals = starts[..., None] + np.clip(kept[:, None] - size * numbers[..., None], 0, size)
        return edges

    def _parts(self, cuts: Sequence[Cut]) -> tuple[NDArray[np.int64], int]:
        """The part of each rank after these cuts, and the number of parts."""
        ranks = np.arange(self.size)
        position = np.zeros_like(ranks)
        for parts, stride, _ in cuts:
            position = position * parts + ranks // stride % parts
        return position, prod(cut.parts for cut in cuts)


def token_axes(sequence_parallel: bool) -> tuple[Axis, ...]:
    """Axes whose ranks hold different tokens between layers, the coarsest cut first."""
    return STAGE if sequence_parallel else SHARDING


@lru_cache(maxsize=100_000)
def token_layout(strategy: Strategy | None, stage_size: int, sequence_parallel: bool = False) -> TokenLayout:
    """Layout of the tokens that enter and leave a layer with this strategy.

    None is the edge of a stage: there each rank sends its own slice to its peer, nothing twice.
    """
    if strategy is None:
        return TokenLayout(stage_size, (Cut(stage_size, 1),) if stage_size > 1 else ())
    mesh = strategy.mesh(stage_size)
    cuts: list[Cut] = []
    for axis in token_axes(sequence_parallel):
        parts, stride, mirrored = mesh.degree(axis), mesh.stride(axis), axis is Axis.CONTEXT
        if cuts and cuts[-1] == (cuts[-1].parts, parts * stride, mirrored):  # together they are one cut
            parts *= cuts.pop().parts
        if parts > 1:
            cuts.append(Cut(parts, stride, mirrored))
    return TokenLayout(stage_size, tuple(cuts))


class Move(NamedTuple):
    """Tokens `start..stop-1` that a local rank gives to another (or keeps, when both are the same)."""

    source: int
    target: int
    start: int
    stop: int


def moves(source: Intervals, target: Intervals) -> list[Move]:
    """The smallest set of moves from source to target: a rank keeps the tokens that it has and receives the others from
    the holder with the nearest local rank."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, held in enumerate(source.tolist()):
        for start, stop in held:
            holders.setdefault((start, stop), []).append(rank)
    parts = sorted((start, stop) for start, stop in holders if start < stop)  # parts of the tokens, side by side
    starts = [start for start, _ in parts]
    result: list[Move] = []
    for rank, wanted in enumerate(target.tolist()):
        for start, stop in wanted:
            for index in parts[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]:
                result.append(Move(_nearest(holders[index], rank), rank, max(start, index[0]), min(stop, index[1])))
    return [move for move in result if move.start < move.stop]


def _nearest(ranks: list[int], rank: int) -> int:
    """The nearest of rising ranks to a rank; of two, the lower."""
    above = bisect_left(ranks, rank)
    return min(ranks[max(0, above - 1) : above + 1], key=lambda other: abs(other - rank))


class LayoutTraffic(NamedTuple):
    """Traffic of one resharding; all of it stays inside blocks of `span` consecutive ranks."""

    span: int
    most_tokens: int  # received by the busiest rank
    all_tokens: int  # the sum over all ranks


def redistribution(source: TokenLayout, target: TokenLayout, tokens: int, samples: int | None = None) -> LayoutTraffic:
    """Tokens that move when `tokens` of a micro-batch, `samples` samples, go from one layout to the other (as
    `moves` does)."""
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
    """Blocks of consecutive ranks that each hold their own part of the tokens, cut equally."""
    parts, stride, mirrored = layout.cuts[0] if layout.cuts else (1, 1, False)
    return parts if parts * stride == layout.size and not mirrored else 1


def _first_of(layout: TokenLayout, blocks: int) -> TokenLayout:
    """The layout of the first of `blocks` blocks."""
    (parts, stride, mirrored), *finer = layout.cuts
    coarsest = [Cut(parts // blocks, stride, mirrored)] if parts > blocks else []
    return TokenLayout(layout.size // blocks, (*coarsest, *finer))


def _repeated(source: TokenLayout, target: TokenLayout, samples: int | None) -> int:
    """Number of equal repetitions over the samples: every rank treats that many consecutive samples in the same way."""
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
        """Number of held tokens before each position."""
        last = np.searchsorted(self.starts, places, "right") - 1  # last interval that begins there or earlier
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
    """Length of blocks of consecutive ranks within which the layout differs from equal slices in rank order."""
    return layout.size // _blocks(layout)
