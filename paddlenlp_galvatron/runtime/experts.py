"""The experts of a layer on one rank: routing, dispatch and combine by all-to-all, and the computation of own experts.

Shapes: T tokens of this rank, k experts a token, E experts, n ranks of the all-to-all group, l experts of a rank,
R rows received. Ranks of the group are ordered by (ep index, etp index); all etp ranks of an expert receive its rows.

Scores are softmax, or sigmoids whose sum over the chosen ones is 1 (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).
A token's experts are the best of all, or the best within a few groups of experts, so that it goes to few devices.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer
from paddle.incubate.nn.functional import swiglu

from ..model import Adapters, ModelShape
from ..model.families import LEAST_SUM
from ..model.lora import FACTORS
from ..plan import Plan
from ..plan.precision import NumberTypes
from ..plan.strategy import Experts
from . import device
from .activations import keep
from .collectives import all_gather, all_reduce, all_to_all
from .grouped import UNPADDED, Padding, grouped, use_every_size
from .precision import cast

ADDED = 1e-20  # added to the sum of a token's sigmoids, as in transformers
BEST_OF_GROUP = 2  # number of sigmoids that rate a group; with softmax: only the best score
LOWEST = -1e30  # far below every score, while sums of two are finite


def score(logits: Any, shape: ModelShape) -> Any:
    """Scores [T, E] of logits in fp32."""
    return nn.functional.sigmoid(logits) if _sigmoid(shape) else nn.functional.softmax(logits, axis=-1)


def choose(scores: Any, bias: Any, shape: ModelShape) -> Any:
    """Indices of each token's experts [T, k], from scores [T, E]. `bias` [E] or [1, E]: only for the choice; None:
    none.

    A GPU's top-k gives -1 for NaN, so NaN is replaced: a loss of NaN is reported at the end of its step, which all
    ranks reach."""
    ranked = paddle.fmax(scores if bias is None else scores + bias, _in_turn(*scores.shape, shape.experts_per_token))
    if shape.expert_groups > 1:
        size = shape.experts // shape.expert_groups
        groups = ranked.reshape([-1, shape.expert_groups, size])
        best = paddle.topk(groups, min(BEST_OF_GROUP, size) if _sigmoid(shape) else 1, axis=-1)[0].sum(-1, keepdim=True)
        least = paddle.topk(best, shape.groups_per_token, axis=1)[0][:, -1:]  # smallest score of the kept groups
        ranked = paddle.where(best >= least, groups, paddle.full([], -float("inf"))).reshape(scores.shape)
    return paddle.topk(ranked, shape.experts_per_token, axis=-1)[1]


@lru_cache
def _in_turn(tokens: int, experts: int, chosen: int) -> Any:
    """Values below every score [T, E] that replace NaN: tokens then use experts in turn, so that no rank gets all
    rows."""
    first = (paddle.arange(tokens) * chosen).unsqueeze(-1)
    return LOWEST * (1 + ((paddle.arange(experts) - first) % experts).astype("float32") / experts)


def shares(scores: Any, chosen: Any, shape: ModelShape) -> Any:
    """The weights [T, k] of a token's experts in their sum."""
    weights = paddle.take_along_axis(scores, chosen, -1, broadcast=False)
    if shape.norm_topk:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + ADDED if _sigmoid(shape) else paddle.clip(total, min=LEAST_SUM))
    return weights if shape.routed_scaling_factor == 1 else weights * shape.routed_scaling_factor


def fractions(scores: Any, shape: ModelShape) -> Any:
    """Scores [T, E] / their sum per token, for the balance loss (DeepSeek-V3, equation 19)."""
    return scores / (scores.sum(-1, keepdim=True) + LEAST_SUM) if _sigmoid(shape) else scores


def _sigmoid(shape: ModelShape) -> bool:
    return bool(shape.traits.mixture and shape.traits.mixture.sigmoid)


class ExpertLoad:
    """Counts over the layers and micro-batches of a step.

    The balance loss of L layers with experts and G samples of S tokens is 1 / (L G) times the sum over layers and
    samples of E · sum_e f_e P_e: f_e is the number of tokens that choose expert e over S, without a gradient, and P_e
    the mean of its probability, of sigmoids the mean of `fractions`. It is k at even load, as in transformers, where f
    and P are means over a whole batch. A mean over samples is the same under every plan.
    """

    def __init__(self, plan: Plan, shape: ModelShape, seq_length: int):
        self.coefficient, self.shape = shape.router_aux_loss_coef, shape
        self.padding = Padding.of(plan)
        self.gradient_scale = 1.0  # fp16's
        self.samples, self.experts = plan.micro_batch, shape.experts
        self.factor = shape.experts / (seq_length**2 * max(shape.layers_with_experts, 1) * plan.global_batch)
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.balance: Any = None  # this rank's part of the balance loss, before its coefficient
        self.imbalances: list[float] = []  # rows of the busiest rank / mean, by layer and micro-batch

    @property
    def imbalance(self) -> tuple[float, float]:
        """Mean and maximum of `imbalances`; 0 if all experts are on this rank."""
        return sum(self.imbalances) / max(1, len(self.imbalances)), max(self.imbalances, default=0.0)


@lru_cache
def _factors(count: int, factor: float) -> Any:
    return paddle.full([count], factor)


class LayerLoad:
    """The load of one layer's experts."""

    def __init__(self, load: ExpertLoad, samples: Sequence[int], group: Any):
        """`samples`: the sample of each of the rank's tokens in a micro-batch. `group`: the ranks that together have
        all tokens of these samples."""
        self._load, self._samples, self._group = load, paddle.to_tensor(samples), group
        self._first = (self._samples * load.experts).unsqueeze(-1)  # [T, 1] of E places of each sample

    def add_imbalance(self, imbalance: float) -> None:
        """Rows of the busiest rank / mean, of one micro-batch."""
        self._load.imbalances.append(imbalance)

    def shares(self, scores: Any, chosen: Any) -> Any:
        """E f_e / (S L G) [M, E] for each of M samples: factors of a token's fractions from `scores` [T, E] in the
        balance loss; None: no balance loss. Only rows of the rank's own samples are valid. `chosen` [T, k]: the experts
        of each of those tokens."""
        load = self._load
        if not load.coefficient:
            return None
        places = (self._first + chosen).reshape([-1, 1])
        shares = paddle.zeros([load.samples * load.experts])
        shares = paddle.scatter_nd_add(shares, places, _factors(places.shape[0], load.factor))
        shares = all_reduce(shares.reshape([load.samples, load.experts]), self._group)
        balance = (shares.index_select(self._samples) * fractions(scores, load.shape)).sum()
        load.balance = balance if load.balance is None else load.balance + balance
        return shares

    def balanced(self, scores: Any, shares: Any) -> Any:
        """Identity on scores [T, E]; backward adds the balance loss's gradient."""
        load = self._load
        return _Balanced.apply(scores, fractions(scores, load.shape), shares.index_select(self._samples), load)


class _Balanced(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, scores: Any, fractions: Any, shares: Any, load: ExpertLoad) -> Any:
        ctx.kept = shares, load
        return scores.view(scores.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        shares, load = ctx.kept
        return grad, load.coefficient * load.gradient_scale * shares


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
        self.layer = nn.Layer()
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
