"""The experts of a layer on one rank: routing, dispatch and combine by all-to-all, and what own experts compute.

Shapes: T tokens of this rank, k experts a token, E experts, n ranks of the all-to-all group, l experts of a rank,
R rows received. Ranks of the group are ordered by (ep index, etp index); all etp ranks of an expert receive its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer
from paddle.incubate.nn.functional import swiglu

from ..model import ModelShape
from ..plan.strategy import Experts
from . import device
from .collectives import all_gather, all_to_all
from .grouped import grouped
from .load import LayerLoad
from .precision import Numbers, cast

PRODUCTS = ("gate", "up", "down")  # of an expert
Memo = dict[str, Any]  # of one call: keeps the choice and the routing of forward for recompute


class Routing:
    """Destinations of the tokens of one micro-batch. Backward and recompute reuse the routing of forward."""

    def __init__(self, chosen: Any, shape: ModelShape, experts: Experts, group: Any, sent: str):
        """`chosen` [T, k]: numbers of experts. `sent`: type of rows on their way."""
        ranks, etp, local = experts.ranks, experts.etp, shape.experts // experts.ep
        self.group, self.sent = group, sent
        self.tokens, self.k = chosen.shape
        self.copies = self.k * etp  # rows of a token
        keys = (chosen // local).unsqueeze(-1) * etp + paddle.arange(etp)  # the rank of each copy
        keys = (keys * local + (chosen % local).unsqueeze(-1)).flatten()
        self.back, rows_each = _places(keys, ranks * local)  # rows by rank, then by expert; always as many
        self.order = _inverse(self.back)
        self.token, self.slot = self.order // self.copies, self.order // etp
        rows = all_gather(rows_each.reshape([1, ranks, local]), group)  # [from, to, expert]
        counts = device.to_host(rows)  # the only read by the host
        me = 0 if group is None else group.rank
        self.rows = counts.sum(-1).tolist()  # from each rank to each
        self.rows_back = counts.sum(-1).T.tolist()
        received = counts.sum((0, 2))
        self.imbalance = float(received.max() / received.mean())
        self.counts = counts[:, me].sum(0).tolist()  # of each of this rank's experts
        # Received rows are segments by (rank, expert), and become segments by (expert, rank).
        received_rows = rows[:, me]
        ends = received_rows.flatten().cumsum(0)
        by_expert = received_rows.T
        first = (by_expert.flatten().cumsum(0).reshape(by_expert.shape) - by_expert).T.flatten()
        shift = first - (ends - received_rows.flatten())
        places = paddle.arange(sum(self.counts), dtype="int64")
        self.by_rank = places + _take(shift, paddle.searchsorted(ends, places, right=True))
        self.by_expert = _inverse(self.by_rank)

    def to_experts(self, rows: Any, sent: str = "") -> Any:
        """[T k etp, ...] by rank -> [R, ...] by expert."""
        return _take(self._exchange(rows, self.rows, sent), self.by_expert)

    def to_tokens(self, rows: Any, sent: str = "") -> Any:
        """[R, ...] by expert -> [T, k etp, ...]."""
        back = self._exchange(_take(rows, self.by_rank), self.rows_back, sent)
        return _take(back, self.back).reshape([self.tokens, self.copies, *rows.shape[1:]])

    def _exchange(self, rows: Any, counts: Any, sent: str) -> Any:
        if self.group is None:
            return rows
        return cast(all_to_all(cast(rows, sent or self.sent), self.group, counts), rows.dtype)


def _places(keys: Any, bins: int) -> tuple[Any, Any]:
    """Place of each of `keys` [n] in a stable sort, and how many keys each of the `bins` has.

    By counting: Paddle's argsort of one axis allocates from a GPU and frees to it, which waits for posted receives."""
    upto = (keys.unsqueeze(-1) == paddle.arange(bins)).astype("int32").cumsum(0)  # [n, bins]
    each = upto[-1].astype("int64")
    first = each.cumsum(0) - each
    own = upto.flatten().index_select(paddle.arange(keys.shape[0]) * bins + keys)
    return first.index_select(keys) + own.astype("int64") - 1, each


def _inverse(places: Any) -> Any:
    """The inverse of a permutation [n]."""
    if not places.shape[0]:
        return places
    numbers = paddle.arange(places.shape[0], dtype="int64")
    return paddle.scatter_nd_add(paddle.zeros_like(numbers), places.unsqueeze(-1), numbers)


def _take(x: Any, index: Any) -> Any:
    """Rows of x by index. Some of Paddle's kernels refuse an empty index."""
    return x.index_select(index) if index.shape[0] else paddle.zeros([0, *x.shape[1:]], x.dtype)


class Dispatch(PyLayer):  # type: ignore[misc]
    """x [T, H] and scores [T, k] -> rows [R, H] and the score of each [R]."""

    @staticmethod
    def forward(ctx: Any, x: Any, scores: Any, routing: Routing) -> Any:
        ctx.routing = routing
        rows = routing.to_experts(x.index_select(routing.token))
        return rows, routing.to_experts(scores.flatten().index_select(routing.slot), "float32")

    @staticmethod
    def backward(ctx: Any, d_rows: Any, d_scores: Any) -> Any:
        routing = ctx.routing
        d_scores = routing.to_tokens(d_scores, "float32").reshape([routing.tokens, routing.k, -1]).sum(-1)
        return routing.to_tokens(d_rows).sum(1), d_scores


class Combine(PyLayer):  # type: ignore[misc]
    """Rows [R, H], already times their scores -> their sums by token [T, H]: the transpose of dispatch."""

    @staticmethod
    def forward(ctx: Any, rows: Any, routing: Routing) -> Any:
        ctx.routing = routing
        return routing.to_tokens(rows).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.routing.to_experts(grad.index_select(ctx.routing.token))


class Products(PyLayer):  # type: ignore[misc]
    """x [R, I] by expert and the experts' weights [l, I, O] -> [R, O]."""

    @staticmethod
    def forward(ctx: Any, x: Any, counts: Sequence[int], weights: Any) -> Any:
        # Not by save_for_backward: zero3 frees the weights after forward and gathers them again for backward.
        ctx.x, ctx.counts, ctx.weights = x, counts, weights
        return grouped(x, weights, counts)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, ctx.x = ctx.x, None  # or it were there until the whole backward pass is done
        of_x = grouped(grad, ctx.weights, ctx.counts, transpose_right=True)
        return of_x, grouped(x, grad, ctx.counts, transpose_left=True)


class Inner(PyLayer):  # type: ignore[misc]
    """gate and up [R, F] and scores [R] -> silu(gate) * up * score [R, F]. Backward makes the first product again, so
    that of a row no more is kept than gate, up and what the last product reads."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any, score: Any) -> Any:
        ctx.kept = gate, up, score
        return swiglu(gate, up) * cast(score, gate.dtype).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (gate, up, score), ctx.kept = ctx.kept, None
        gate, up = gate.detach(), up.detach()
        gate.stop_gradient = up.stop_gradient = False
        with paddle.enable_grad():
            product = swiglu(gate, up)
        of_score = (grad * product).sum(-1)
        paddle.autograd.backward([product], [grad * cast(score, grad.dtype).unsqueeze(-1)])
        return gate.grad, up.grad, cast(of_score, score.dtype)


class OwnExperts:
    """A rank's experts of one layer. `layer` has the weights [l, ...] of each of PRODUCTS."""

    def __init__(self, shape: ModelShape, experts: Experts, group: Any, numbers: Numbers, load: LayerLoad):
        self.layer = nn.Layer()
        self._shape, self._experts, self._group, self._numbers, self._load = shape, experts, group, numbers, load

    def __call__(self, x: Any, router: Any, memo: Memo) -> Any:
        """x [T, H] of this rank's own tokens -> the weighted sum of each token's experts [T, H]. `router` [H, E]."""
        shape = self._shape
        logits = paddle.matmul(cast(x, "float32"), cast(router, "float32"))
        probabilities = nn.functional.softmax(logits, axis=-1)
        if "chosen" not in memo:
            with paddle.no_grad():
                memo["chosen"] = paddle.topk(probabilities.detach(), shape.experts_per_token, axis=-1)[1]
                memo["shares"] = self._load.shares(probabilities, memo["chosen"])
        if memo["shares"] is not None:
            probabilities = self._load.balanced(probabilities, memo["shares"])
        scores = paddle.take_along_axis(probabilities, memo["chosen"], axis=-1)
        if shape.norm_topk:
            scores = scores / scores.sum(-1, keepdim=True)
        if not shape.expert_size:
            return x + cast(scores.sum(-1, keepdim=True), x.dtype)  # no time to speak of, but a gradient for the router
        return self.weighted(x, scores, memo)

    def weighted(self, x: Any, scores: Any, memo: Memo) -> Any:
        """x [T, H] and scores [T, k] of the experts memo["chosen"] [T, k] -> their weighted sum [T, H]."""
        if "routing" not in memo:
            with paddle.no_grad():
                routing = Routing(memo["chosen"], self._shape, self._experts, self._group, self._numbers.stored)
            if self._experts.ep > 1:
                self._load.add_imbalance(routing.imbalance)
            memo["routing"] = routing
        routing = memo["routing"]
        rows, score = Dispatch.apply(x, scores, routing)
        gate, up = (Products.apply(rows, routing.counts, weights) for weights in (self.layer.gate, self.layer.up))
        # The score multiplies the input of the last product, so that backward need not keep that product's output.
        inner = Inner.apply(gate, up, score)
        return Combine.apply(Products.apply(inner, routing.counts, self.layer.down), routing)
