"""The router of a layer with experts: scores of its logits, the choice of each token's experts, and the balance loss.

Scores are softmax, or sigmoids whose sum over the chosen ones is 1 (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).
A token's experts are the best of all, or the best within a few groups of experts, so that it goes to few devices.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ..model import ModelShape
from ..model.families import LEAST_SUM
from ..plan import Plan
from .collectives import all_reduce
from .grouped import Padding

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
