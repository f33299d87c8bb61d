"""Rank layout: which ranks form the groups of a layer, and which tokens each rank holds. Owns the rank grid.

A stage owns consecutive ranks. Inside it a layer arranges the *local ranks* 0..n-1 as a grid of dp x degree;
consecutive layers number along the degree first (local = dp_index * degree + index), strided ones along dp first.
The tokens of one micro-batch, samples one after the other, are numbered 0..N-1; a rank holds one interval of them.
Because tokens are cut in rank order, all consecutive layers with sharded tokens (dp, Megatron-SP and Ulysses of any
degree) hold the same interval on every rank: going from one to another moves nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from .strategy import LayerStrategy, Plan, VocabStrategy

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Grid:
    """Placement of one layer on the local ranks of a stage."""

    size: int  # ranks of the stage
    degree: int
    consecutive: bool = True

    @property
    def dp(self) -> int:
        return self.size // self.degree

    def index(self, rank: int) -> int:
        """Position of a local rank in its tp (or Ulysses) group."""
        return rank % self.degree if self.consecutive else rank // self.dp

    def dp_index(self, rank: int) -> int:
        """Position of a local rank in its dp group."""
        return rank // self.degree if self.consecutive else rank % self.dp

    def rank(self, dp_index: int, index: int) -> int:
        """Local rank at a place of the grid."""
        return dp_index * self.degree + index if self.consecutive else index * self.dp + dp_index

    def tp_group(self, rank: int) -> tuple[int, ...]:
        """Local ranks that share the samples of a local rank."""
        return tuple(self.rank(self.dp_index(rank), i) for i in range(self.degree))

    def dp_group(self, rank: int) -> tuple[int, ...]:
        """Local ranks at the same tp index, one per dp index."""
        return tuple(self.rank(d, self.index(rank)) for d in range(self.dp))

    def copies(self, rank: int, parts: int) -> tuple[int, ...]:
        """Local ranks of a tp group that hold the same of `parts` < degree parts as a local rank: neighbours in it."""
        share = self.degree // parts
        first = self.index(rank) // share * share
        return tuple(self.rank(self.dp_index(rank), first + i) for i in range(share))

    def tp_groups(self) -> list[tuple[int, ...]]:
        return [self.tp_group(self.rank(d, 0)) for d in range(self.dp)]

    def dp_groups(self) -> list[tuple[int, ...]]:
        return [self.dp_group(self.rank(0, i)) for i in range(self.degree)]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Which tokens of a micro-batch each local rank of a stage holds at a layer's edge."""

    grid: Grid
    sharded: bool  # the ranks of a tp group hold a slice each, not all the same tokens

    def interval(self, rank: int, tokens: int) -> Interval:
        """First and last-plus-one token of a local rank; `tokens` is the whole micro-batch's."""
        parts, part = self.grid.dp, self.grid.dp_index(rank)
        if self.sharded:
            parts, part = self.grid.size, part * self.grid.degree + self.grid.index(rank)
        return part * tokens // parts, (part + 1) * tokens // parts

    def intervals(self, tokens: int) -> tuple[Interval, ...]:
        return tuple(self.interval(r, tokens) for r in range(self.grid.size))


class Move(NamedTuple):
    """Tokens `start..stop-1` that a local rank gives to another (or keeps, when both are the same)."""

    source: int
    target: int
    start: int
    stop: int


def grid_of(plan: Plan, strategy: LayerStrategy | VocabStrategy) -> Grid:
    """Grid of a layer with this strategy."""
    layer = strategy.as_layer() if isinstance(strategy, VocabStrategy) else strategy
    return Grid(plan.stage_size, layer.degree, layer.consecutive)


def token_layout(plan: Plan, strategy: LayerStrategy | VocabStrategy) -> TokenLayout:
    """Layout of the tokens that enter and leave a layer with this strategy."""
    return TokenLayout(grid_of(plan, strategy), strategy.ulysses or plan.assumed.sequence_parallel)


def boundary_layout(stage_size: int) -> TokenLayout:
    """Layout in which tokens travel between stages: each rank sends its own slice to its peer, nothing twice."""
    return TokenLayout(Grid(stage_size, 1), sharded=True)


def moves(source: TokenLayout, target: TokenLayout, tokens: int) -> list[Move]:
    """Smallest set of moves that turns one layout into another: what a rank has, it keeps; the rest comes from the
    holder whose local rank is nearest."""
    holders: dict[Interval, list[int]] = {}
    for rank, held in enumerate(source.intervals(tokens)):
        holders.setdefault(held, []).append(rank)
    parts = sorted((start, stop) for start, stop in holders if start < stop)  # of the tokens, side by side
    starts = [start for start, _ in parts]
    result: list[Move] = []
    for rank, (start, stop) in enumerate(target.intervals(tokens)):
        for part in parts[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]:
            result.append(Move(_nearest(holders[part], rank), rank, max(start, part[0]), min(stop, part[1])))
    return [move for move in result if move.start < move.stop]


def _nearest(ranks: list[int], rank: int) -> int:
    """Of rising ranks, the nearest to a rank; of two, the lower one."""
    above = bisect_left(ranks, rank)
    return min(ranks[max(0, above - 1) : above + 1], key=lambda other: abs(other - rank))
