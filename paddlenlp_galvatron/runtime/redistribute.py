"""Moves tokens between the layouts of two neighbouring layers, and their gradients back."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from ..plan.communicators import REDISTRIBUTE, Ranks, redistribution_groups
from ..plan.layout import Intervals, Move, TokenLayout, moves
from .collectives import all_to_all
from .groups import RankGroups
from .trace import span


class Redistribution:
    """Turns this rank's tokens [T, …] of one layout into those of another. Differentiable; backward moves back."""

    def __init__(self, source: TokenLayout, target: TokenLayout, tokens: int, samples: int, here: RankGroups):
        """`tokens` and `samples` are the whole micro-batch's."""
        local = here.local
        ranks = next((r for r in redistribution_groups(source, target, tokens, samples) if local in r), (local,))
        group = here.of_stage(ranks, REDISTRIBUTE)
        held, wanted = source.intervals(tokens, samples), target.intervals(tokens, samples)
        self._forward = _Exchange(held, wanted, local, ranks, group)
        self._backward = _Exchange(wanted, held, local, ranks, group)

    def __call__(self, x: Any) -> Any:
        return _Redistribute.apply(x, self._forward, self._backward)


class _Exchange:
    """One direction of a redistribution, from the point of view of one rank."""

    def __init__(self, held: Intervals, wanted: Intervals, local: int, ranks: Ranks, group: Any):
        plan = moves(held, wanted)
        self.group = group
        self.held: list[tuple[int, int]] = held[local].tolist()
        self.kept = [move for move in plan if move.source == move.target == local]
        crossing = [move for move in plan if move.source != move.target and move.source in ranks]
        self.sent = [move for rank in ranks for move in crossing if (move.source, move.target) == (local, rank)]
        self.received = [move for rank in ranks for move in crossing if (move.source, move.target) == (rank, local)]
        self.rows = [[0] * len(ranks) for _ in ranks]  # from each to each
        for move in crossing:
            self.rows[ranks.index(move.source)][ranks.index(move.target)] += move.stop - move.start
        self.silent = group is None or not crossing

    def __call__(self, x: Any) -> Any:
        pieces = [(move.start, self._rows(x, move)) for move in self.kept]
        if not self.silent:
            pieces += self._exchange(x)
        pieces.sort(key=lambda piece: piece[0])
        parts = [rows for _, rows in pieces]
        return parts[0].clone() if len(parts) == 1 else paddle.concat(parts)  # a PyLayer's tensors are its own

    def _rows(self, x: Any, move: Move) -> Any:
        before = 0  # tokens in the intervals before that in which these lie
        for start, stop in self.held:
            if start <= move.start < stop:
                return x[before + move.start - start : before + move.stop - start]
            before += stop - start
        raise AssertionError(f"{move} is of tokens that are not here")

    def _exchange(self, x: Any) -> list[tuple[int, Any]]:
        outgoing = [self._rows(x, move) for move in self.sent]
        joined = paddle.concat(outgoing) if outgoing else paddle.empty([0, *x.shape[1:]], x.dtype)
        rows = all_to_all(joined, self.group, self.rows)
        pieces, offset = [], 0
        for move in self.received:
            length = move.stop - move.start
            pieces.append((move.start, rows[offset : offset + length]))
            offset += length
        return pieces


class _Redistribute(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, forward: _Exchange, backward: _Exchange) -> Any:
        ctx.exchange = backward
        with span("resharding", "layout"):
            return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with span("resharding", "layout"):
            return ctx.exchange(grad)
