"""Token layout: which tokens of a micro-batch each rank of a stage holds, and how they get from one layout to another.

The tokens of one micro-batch, samples one after the other, are numbered 0..N-1. Because they are cut in the order of
the ranks, all consecutive layers with sharded tokens (dp, Megatron-SP and Ulysses of any degree) have one layout: going
from one to another moves nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .mesh import Axis
from .strategy import Strategy

# [ranks, intervals, 2]: first and last-plus-one token of the intervals that each rank holds, rising.
Intervals = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Which tokens each local rank of a stage holds at a layer's edge. Equal layouts are equal objects."""

    size: int  # ranks of the stage
    # (parts, stride), the coarsest first: of the part that the cut before left, rank r has part r // stride % parts.
    cuts: tuple[tuple[int, int], ...]

    def intervals(self, tokens: int) -> Intervals:
        """What each local rank holds of the micro-batch's `tokens`."""
        ranks = np.arange(self.size)
        part = np.zeros_like(ranks)
        for parts, stride in self.cuts:
            part = part * parts + ranks // stride % parts
        edges: Intervals = np.stack([part, part + 1], axis=1) * tokens // prod(parts for parts, _ in self.cuts)
        return edges[:, None]


def token_axes(sequence_parallel: bool) -> tuple[Axis, ...]:
    """Axes whose ranks hold different tokens between layers, the coarsest cut first."""
    return (Axis.DATA, Axis.ULYSSES, Axis.TENSOR) if sequence_parallel else (Axis.DATA, Axis.ULYSSES)


@lru_cache(maxsize=100_000)
def token_layout(strategy: Strategy | None, stage_size: int, sequence_parallel: bool = False) -> TokenLayout:
    """Layout of the tokens that enter and leave a layer with this strategy.

    None is the edge of a stage: there each rank sends its own slice to its peer, nothing twice.
    """
    if strategy is None:
        return TokenLayout(stage_size, ((stage_size, 1),) if stage_size > 1 else ())
    mesh = strategy.mesh(stage_size)
    cuts: list[tuple[int, int]] = []
    for axis in token_axes(sequence_parallel):
        parts, stride = mesh.degree(axis), mesh.stride(axis)
        if cuts and cuts[-1][1] == parts * stride:  # together they are one cut
            parts *= cuts.pop()[0]
        if parts > 1:
            cuts.append((parts, stride))
    return TokenLayout(stage_size, tuple(cuts))


class Move(NamedTuple):
    """Tokens `start..stop-1` that a local rank gives to another (or keeps, when both are the same)."""

    source: int
    target: int
    start: int
    stop: int


def moves(source: Intervals, target: Intervals) -> list[Move]:
    """Smallest set of moves that turns what ranks hold into what they are to hold: what a rank has, it keeps; the rest
    comes from the holder whose local rank is nearest."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, held in enumerate(source.tolist()):
        for start, stop in held:
            holders.setdefault((start, stop), []).append(rank)
    parts = sorted((start, stop) for start, stop in holders if start < stop)  # of the tokens, side by side
    starts = [start for start, _ in parts]
    result: list[Move] = []
    for rank, wanted in enumerate(target.tolist()):
        for start, stop in wanted:
            for part in parts[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]:
                result.append(Move(_nearest(holders[part], rank), rank, max(start, part[0]), min(stop, part[1])))
    return [move for move in result if move.start < move.stop]


def _nearest(ranks: list[int], rank: int) -> int:
    """Of rising ranks, the nearest to a rank; of two, the lower one."""
    above = bisect_left(ranks, rank)
    return min(ranks[max(0, above - 1) : above + 1], key=lambda other: abs(other - rank))
