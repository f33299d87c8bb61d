"""The experts of a layer on one rank: routing, dispatch and combine by all-to-all, and the computation of own experts.

Shapes: T tokens of this rank, k experts a token, E experts, n ranks of the all-to-all group, l experts of a rank,
R rows received. Ranks of the group are ordered by (ep index, etp index); all etp ranks of an expert receive its rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer
from paddle.incubate.nn.functional import swiglu

from ..model import Adapters, ModelShape
from ..model.lora import FACTORS
from ..plan.precision import NumberTypes
from ..plan.strategy import Experts
from . import device
from .activations import keep
from .collectives import all_gather, all_to_all
from .grouped import UNPADDED, Padding, grouped, use_every_size
from .precision import cast
from .router import LayerLoad, choose, score, shares

PRODUCTS = ("gate", "up", "down")  # products of an expert
Memo = dict[str, Any]  # of one call: keeps the choice and the routing of forward for recompute


class Routing:
    """Destinations of the tokens of one micro-batch. Backward and recompute reuse the routing of forward.

    `padding` sets each expert's number of rows: padding rows are copies of another row with score 0, so that they
    affect neither results nor gradients.
    """

    def __init__(
        self, chosen: Any, shape: ModelShape, experts: Experts, group: Any, sent: str, padding: Padding = UNPADDED
    ):
        """`chosen` [T, k]: indices of experts. `sent`: number type of rows in messages."""
        ranks, etp, local = experts.ranks, experts.etp, shape.experts // experts.ep
        self.group, self.sent = group, sent
        self.tokens, self.k = chosen.shape
        self.copies = self.k * etp  # rows of a token
        self.back, rows_each = _places(chosen.flatten(), experts.ep, etp, local)  # ordered by rank, then by expert
        count = self.tokens * self.copies
        self.order = _put(_numbers(count), self.back, count)
        self.token = self.order // self.copies
        self.slot = self.order if etp == 1 else self.order // etp
        rows = all_gather(rows_each.reshape([1, ranks, local]), group)  # [from, to, expert]
        counts = device.to_host(rows)  # the only read by the host
        me = 0 if group is None else group.rank
        self.rows = counts.sum(-1).tolist()  # rows between each pair of ranks
        self.rows_back = counts.sum(-1).T.tolist()
        received = counts.sum((0, 2))
        self.imbalance = float(received.max() / received.mean())
        local_counts = counts[:, me].sum(0).tolist()
        self.counts = padding.rows(local_counts, float(received.mean()), experts.ep)  # rows of each expert of this rank
        by_rank, by_expert = _by_expert(counts[:, me], self.counts)
        self.by_rank, self.by_expert = device.to_device(by_rank), device.to_device(by_expert)

    def to_experts(self, rows: Any) -> Any:
        """[T k etp, ...] by rank -> [R, ...] by expert."""
        return _take(self._exchange(rows, self.rows), self.by_expert)

    def scores_to_experts(self, scores: Any) -> Any:
        """[T k etp, 1] by rank -> [R, 1] by expert, 0 for padding rows."""
        return _put(self._exchange(scores, self.rows, "float32"), self.by_rank, sum(self.counts))

    def to_tokens(self, rows: Any, sent: str = "") -> Any:
        """[R, ...] by expert -> [T, k etp, ...]."""
        back = self._exchange(_take(rows, self.by_rank), self.rows_back, sent)
        return _take(back, self.back).reshape([self.tokens, self.copies, *rows.shape[1:]])

    def _exchange(self, rows: Any, counts: Any, sent: str = "") -> Any:
        if self.group is None:
            return rows
        return cast(all_to_all(cast(rows, sent or self.sent), self.group, counts), rows.dtype)


@lru_cache
def _numbers(count: int) -> Any:
    """0, 1, ... [count]. Cached: making it takes four Python calls."""
    return paddle.arange(count)


def _places(keys: Any, ep: int, etp: int, local: int) -> tuple[Any, Any]:
    """Position of each copy of `keys` [n] (indices of experts) in a stable sort by rank and expert [n · etp]; and the
    number of keys per expert of each rank [ep · etp, local].

    By counting: Paddle's argsort allocates and frees GPU memory, which waits for posted receives. The
    keys lie along the last axis, as Paddle's cumsum transposes others, and PyTorch's takes fifty times as long."""
    count = keys.shape[0]
    upto = (_numbers(ep * local).unsqueeze(-1) == keys).cumsum(-1, "int32")  # [experts, n]
    each = upto[:, -1].astype("int64")
    places = upto.flatten().index_select(keys * count + _numbers(count)).astype("int64")
    starts, of_ranks = each.cumsum(0) - each - 1, each.reshape([ep, 1, local])
    if etp == 1:
        return starts.index_select(keys) + places, of_ranks
    rows = of_ranks.sum(-1)  # [ep, 1]; of each etp rank
    rows_before = (etp - 1) * (rows.cumsum(0) - rows) + rows * _numbers(etp)  # rows of other copies, [ep, etp]
    places = (starts.index_select(keys) + places).unsqueeze(-1) + rows_before.index_select(keys // local)
    return places.flatten(), of_ranks.expand([ep, etp, local])


def _put(values: Any, places: Any, count: int) -> Any:
    """`values` [n, ...] at `places` [n], all different, of [count, ...]; 0 elsewhere."""
    zeros = paddle.zeros([count, *values.shape[1:]], values.dtype)
    return paddle.scatter(zeros, places, values) if places.shape[0] else zeros


def _by_expert(rows: Any, padded: Sequence[int]) -> tuple[Any, Any]:
    """Reorders received rows from (rank, expert) to (expert, rank). `rows` [rank, expert]: their numbers; `padded`:
    rows of each expert. Returns the positions of the received rows, and the source of each position (the first row for
    padding)."""
    starts = np.cumsum(padded) - padded + np.cumsum(rows, 0) - rows  # [rank, expert]
    shifts = starts.ravel() - (np.cumsum(rows) - rows.ravel())
    places = np.arange(rows.sum()) + np.repeat(shifts, rows.ravel())
    taken = np.zeros(sum(padded), np.int64)
    taken[places] = np.arange(len(places))
    return places, taken


def _take(x: Any, index: Any) -> Any:
    """Rows of x by index; zeros where x has no rows, as on a rank with nothing but padding. Some of Paddle's kernels
    refuse an empty index."""
    filled = x.shape[0] and index.shape[0]
    return x.index_select(index) if filled else paddle.zeros([index.shape[0], *x.shape[1:]], x.dtype)


class Dispatch(PyLayer):  # type: ignore[misc]
    """x [T, H] and scores [T, k] -> rows [R, H] and the score of each [R, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Any, scores: Any, routing: Routing) -> Any:
        ctx.routing = routing
        rows = routing.to_experts(x.index_select(routing.token))
        return rows, routing.scores_to_experts(scores.reshape([-1, 1]).index_select(routing.slot))

    @staticmethod
    def backward(ctx: Any, d_rows: Any, d_scores: Any) -> Any:
        routing = ctx.routing
        d_scores = routing.to_tokens(d_scores, "float32").reshape([routing.tokens, routing.k, -1]).sum(-1)
        return routing.to_tokens(d_rows).sum(1), d_scores


class Combine(PyLayer):  # type: ignore[misc]
    """Rows [R, H], already multiplied by their scores -> sums by token [T, H]: the transpose of dispatch."""

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
        # Not save_for_backward: zero3 frees the weights after forward and gathers them again for backward.
        ctx.kept, ctx.counts, ctx.weights = keep(*() if weights.stop_gradient else (x,)), counts, weights
        return grouped(x, weights, counts)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        kept, ctx.kept = ctx.kept(), None  # frees it now; a reference would keep it until backward ends
        of_x = grouped(grad, ctx.weights, ctx.counts, transpose_right=True)
        if not kept:  # weights are frozen
            return of_x, None
        return of_x, grouped(kept[0], grad, ctx.counts, transpose_left=True)


class Inner(PyLayer):  # type: ignore[misc]
    """gate and up [R, F], scores [R, 1] -> silu(gate) * up * score [R, F]. Backward computes the first product again,
    so that only gate, up and the input of the last product are kept per row."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any, score: Any) -> Any:
        ctx.kept = keep(gate, up, score)
        return swiglu(gate, up) * cast(score, gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (gate, up, score), ctx.kept = ctx.kept(), None
        gate, up = gate.detach(), up.detach()
        gate.stop_gradient = up.stop_gradient = False
        with paddle.enable_grad():
            product = swiglu(gate, up)
        of_score = (grad * product).sum(-1, keepdim=True)
        paddle.autograd.backward([product], [grad * cast(score, grad.dtype)])
        return gate.grad, up.grad, cast(of_score, score.dtype)


class OwnExperts:
    """A rank's experts of one layer. `layer` has the weights [l, ...] of each of PRODUCTS, and of its adapters."""

    def __init__(
        self,
        shape: ModelShape,
        experts: Experts,
        group: Any,
        numbers: NumberTypes,
        load: LayerLoad,
        padding: Padding = UNPADDED,
        adapters: Adapters | None = None,
    ):
        self.layer = paddle.nn.Layer()
        self.counts = True  # False: adapters are disabled
        self._adapters = adapters
        self._shape, self._experts, self._group, self._numbers, self._load = shape, experts, group, numbers, load
        self._padding = padding

    def __call__(self, x: Any, router: Any, bias: Any, memo: Memo) -> Any:
        """x [T, H] of this rank's own tokens -> the weighted sum of each token's experts [T, H]. `router` has weights
        [H, E]; `bias` of the choice [E] or [1, E], or None."""
        shape = self._shape
        logits = paddle.matmul(cast(x, "float32"), cast(router.weight, "float32"))
        probabilities = score(logits, shape)
        if "chosen" not in memo:
            with paddle.no_grad():
                memo["chosen"] = choose(probabilities, bias, shape)
                memo["shares"] = self._load.shares(probabilities, memo["chosen"])
                if shape.expert_size:
                    self.route(x, memo)
        if memo["shares"] is not None:
            probabilities = self._load.balanced(probabilities, memo["shares"])
        scores = shares(probabilities, memo["chosen"], shape)
        if not shape.expert_size:
            return x + cast(scores.sum(-1, keepdim=True), x.dtype)  # negligible time; gives the router a gradient
        return self.weighted(x, scores, memo)

    def route(self, x: Any, memo: Memo) -> None:
        """Makes memo["routing"] of memo["chosen"] [T, k], for x [T, H]."""
        how = self._shape, self._experts, self._group, self._numbers.sent.dtype, self._padding
        routing = memo["routing"] = Routing(memo["chosen"], *how)
        if self._experts.ep > 1:
            self._load.add_imbalance(routing.imbalance)
        if self._padding.fills:
            self._use_every_size(x)

    def weighted(self, x: Any, scores: Any, memo: Memo) -> Any:
        """x [T, H] and scores [T, k] of experts by memo["routing"] -> their weighted sum [T, H]."""
        routing = memo["routing"]
        rows, score = Dispatch.apply(x, scores, routing)
        gate, up = (self._product(rows, routing.counts, name) for name in PRODUCTS[:2])
        # The score multiplies the input of the last product, so that backward need not keep that product's output.
        inner = Inner.apply(gate, up, score)
        return Combine.apply(self._product(inner, routing.counts, PRODUCTS[2]), routing)

    def _product(self, x: Any, counts: Sequence[int], name: str) -> Any:
        """x [R, I] by expert -> the product [R, O] of this name, with that of its adapters."""
        product = Products.apply(x, counts, getattr(self.layer, name))
        if not (self._adapters and self.counts):
            return product
        first, second = (getattr(self.layer, f"{name}_{factor}") for factor in FACTORS)
        narrow = Products.apply(x, counts, first) * self._adapters.scaling
        return product + Products.apply(narrow, counts, second)

    def _use_every_size(self, x: Any) -> None:
        """Multiply each possible number of rows of an expert once. `x` [T, H]: this rank's tokens."""
        tokens, hidden = x.shape
        experts, inner = self._experts, self._shape.expert_size // self._experts.etp
        mean = tokens * self._shape.experts_per_token * experts.etp
        most = int(min(tokens * experts.ranks, self._padding.most(mean, experts.ep)))
        ranks = [self._adapters.rank] if self._adapters else []
        for columns in permutations((hidden, inner, *ranks), 2):
            use_every_size(most, *columns, x.dtype)
