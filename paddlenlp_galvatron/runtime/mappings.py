"""Differentiable communication of tokens: at the communication points of a layer, in products that read the tokens of
all ranks, and between the layouts of two neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle.autograd import PyLayer

from ..plan.comm_points import Op
from ..plan.communicators import REDISTRIBUTE, Ranks, redistribution_groups
from ..plan.layout import Intervals, Move, TokenLayout, moves
from ..plan.precision import NumberTypes
from .activations import keep
from .collectives import all_gather, all_gather_start, all_reduce, all_to_all, reduce_scatter, reduce_scatter_start
from .groups import RankGroups
from .lora import after_products, read_by
from .precision import cast
from .trace import span


def _sum(x: Any, group: Any) -> Any:
    return all_reduce(x.clone(), group)


def _to_heads(x: Any, group: Any) -> Any:
    """[T, n·C], own tokens of all heads -> [T·n, C], all tokens of own heads."""
    tokens, width = x.shape
    by_rank = x.reshape([tokens, group.nranks, width // group.nranks]).transpose([1, 0, 2])
    return all_to_all(by_rank.reshape([tokens * group.nranks, -1]), group)


def _to_tokens(x: Any, group: Any) -> Any:
    """[T·n, C] -> [T, n·C]."""
    tokens = x.shape[0] // group.nranks
    by_rank = all_to_all(x, group).reshape([group.nranks, tokens, -1])
    return by_rank.transpose([1, 0, 2]).reshape([tokens, -1])


def _gather_chunks(x: Any, group: Any) -> Any:
    """[B, 2·s, …], a rank's two chunks of s tokens -> [B, 2·n·s, …], all in order."""
    (samples, length, *rest), axes = x.shape, range(2, x.ndim + 1)
    chunks = all_gather(x, group).reshape([group.nranks, samples, 2, length // 2, *rest])
    fronts, ends = (chunks[:, :, half].transpose([1, 0, *axes]) for half in (0, 1))
    return paddle.concat([fronts, ends[:, ::-1]], axis=1).reshape([samples, group.nranks * length, *rest])


def _scatter_chunks(grad: Any, group: Any) -> Any:
    """[B, 2·n·s, …] -> [B, 2·s, …]: a rank's two chunks of the sum over the group."""
    (samples, length, *rest), axes, ranks = grad.shape, range(2, grad.ndim + 2), group.nranks
    chunks = grad.reshape([samples, 2 * ranks, length // (2 * ranks), *rest])
    by_rank = paddle.stack([chunks[:, :ranks], chunks[:, ranks:][:, ::-1]], axis=2).transpose([1, 0, *axes])
    return reduce_scatter(by_rank.reshape([ranks * samples, length // ranks, *rest]), group)


def _own(x: Any, group: Any) -> Any:
    """This rank's part of tokens that all ranks hold."""
    count = x.shape[0] // group.nranks
    return x[group.rank * count : (group.rank + 1) * count].clone()


OPS: dict[Op, tuple[Any, Any]] = {  # None: nothing
    # Tensor parallelism: plain, and Megatron-SP, whose tokens are sharded between layers and gathered in `products`.
    Op.GATHER: (all_gather, reduce_scatter),
    Op.SHARE: (all_gather, reduce_scatter),
    Op.SCATTER: (reduce_scatter, all_gather),
    Op.REPLICATE: (None, _sum),
    Op.REDUCE: (_sum, None),
    # Ulysses: tokens are exchanged for heads before attention and back after it.
    Op.TO_HEADS: (_to_heads, _to_tokens),
    Op.TO_TOKENS: (_to_tokens, _to_heads),
    # Context parallelism: keys and values of whole samples.
    Op.GATHER_CHUNKS: (_gather_chunks, _scatter_chunks),
    # Experts under plain tensor parallelism: a rank has all tokens and sends its own part.
    Op.TAKE: (_own, all_gather),
    Op.GIVE: (all_gather, _own),
}


class Crossing(PyLayer):  # type: ignore[misc]
    """An operation at a communication point, over a group."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: Op, group: Any) -> Any:
        run, ctx.back = OPS[op]
        ctx.group = group
        # A PyLayer must return a new tensor, which may share the memory.
        return run(x, group) if run else x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.back(grad, ctx.group) if ctx.back else grad


class Redistribution:
    """Reshards this rank's tokens [T, …] between layouts. Differentiable; backward reshards back."""

    def __init__(self, source: TokenLayout, target: TokenLayout, tokens: int, samples: int, here: RankGroups):
        """`tokens` and `samples` are the whole micro-batch's."""
        local = here.local
        ranks = next((r for r in redistribution_groups(source, target, tokens, samples) if local in r), (local,))
        group = here.of_stage(ranks, REDISTRIBUTE)
        sources, targets = source.intervals(tokens, samples), target.intervals(tokens, samples)
        self._forward = _Exchange(sources, targets, local, ranks, group)
        self._backward = _Exchange(targets, sources, local, ranks, group)

    def __call__(self, x: Any) -> Any:
        return _Redistribute.apply(x, self._forward, self._backward)


class _Exchange:
    """One direction of a redistribution, from the point of view of one rank."""

    def __init__(self, sources: Intervals, targets: Intervals, local: int, ranks: Ranks, group: Any):
        plan = moves(sources, targets)
        self.group = group
        self.held: list[tuple[int, int]] = sources[local].tolist()
        self.kept = [move for move in plan if move.source == move.target == local]
        crossing = [move for move in plan if move.source != move.target and move.source in ranks]
        self.sent = [move for rank in ranks for move in crossing if (move.source, move.target) == (local, rank)]
        self.received = [move for rank in ranks for move in crossing if (move.source, move.target) == (rank, local)]
        self.rows = [[0] * len(ranks) for _ in ranks]  # rows between each pair of ranks
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
        offset = 0  # tokens in the intervals before this one
        for start, stop in self.held:
            if start <= move.start < stop:
                return x[offset + move.start - start : offset + move.stop - start]
            offset += stop - start
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


class GatheredProducts(PyLayer):  # type: ignore[misc]
    """A rank's tokens [T, H] and matrices [H, C] each -> the products [T·n, C] of all tokens of a group of n ranks.

    `keeps`: keep the gathered tokens, if backward follows at once; `transposed`: the matrices are [C, H].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, group: Any, numbers: NumberTypes, keeps: bool, transposed: bool, *matrices: Any
    ) -> tuple[Any, ...]:
        tokens = cast(all_gather(cast(x, numbers.sent.dtype), group), numbers.computed.dtype)
        ctx.kept, ctx.matrices = keep(tokens if keeps else x), matrices
        ctx.how = group, numbers, keeps, transposed, not x.stop_gradient
        return tuple(paddle.matmul(tokens, matrix, transpose_y=transposed) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (kept,), matrices, (group, numbers, keeps, transposed, tracked) = ctx.kept(), ctx.matrices, ctx.how
        ctx.kept = ctx.matrices = None  # autograd's graph holds this call until all of backward ends
        learn = [not matrix.stop_gradient for matrix in matrices]
        arriving = leaving = None
        if any(learn) and not keeps:
            arriving = all_gather_start(cast(kept, numbers.sent.dtype), group)
        if tracked:
            total = None
            for gradient, matrix in zip(gradients, matrices, strict=True):
                product = paddle.matmul(gradient, matrix, transpose_y=not transposed)
                total = product if total is None else total.add_(product)
            leaving = reduce_scatter_start(cast(total, numbers.sent.dtype), group)
            del total, product
        tokens = cast(arriving.wait(), numbers.computed.dtype) if arriving else kept
        pairs = [(gradient, tokens) if transposed else (tokens, gradient) for gradient in gradients]
        of_matrices = [
            paddle.matmul(*pair, transpose_x=True) if learns else None
            for pair, learns in zip(pairs, learn, strict=True)
        ]
        return cast(leaving.wait(), numbers.computed.dtype) if leaving else None, *of_matrices


Multiply = Callable[..., tuple[Any, ...]]  # a rank's tokens and matrices -> products of all tokens


def read_together(layers: list[Any], multiply: Multiply) -> None:
    """Make linear layers that run one after the other on the same input share one call of `multiply`."""
    waiting: list[list[Any]] = []  # products for layers that have not run yet

    def forward(layer: Any, x: Any) -> Any:
        if layer is layers[0]:
            each = [read_by(reader) for reader in layers]
            products = list(multiply(x, *(matrix for matrices in each for matrix in matrices)))
            waiting[:] = [[products.pop(0) for _ in matrices] for matrices in each]
        return after_products(layer, *waiting.pop(0))

    for layer in layers:
        layer.forward = partial(forward, layer)
