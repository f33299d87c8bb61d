"""How evenly the experts of a stage's layers get tokens: the balance loss, and the rows of the busiest rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import paddle
from paddle.autograd import PyLayer

from ..model import ModelShape
from ..plan import Plan
from .collectives import all_reduce
from .grouped import Padding


class Load:
    """Counts over the layers and micro-batches of a step.

    The balance loss of L layers with experts and G samples of S tokens is 1 / (L G) times the sum over layers and
    samples of E · sum_e f_e P_e: f_e is the number of tokens that choose expert e over S, without a gradient, and P_e
    the mean of its probability. It is k at even load, as in transformers, where f and P are means over a whole batch.
    A mean over samples is one that no plan changes.
    """

    def __init__(self, plan: Plan, shape: ModelShape, seq_length: int):
        self.coefficient = shape.router_aux_loss_coef
        self.padding = Padding.of(plan)
        self.gradient_scale = 1.0  # fp16's
        self.samples, self.experts = plan.micro_batch, shape.experts
        self.factor = shape.experts / (seq_length**2 * max(shape.layers_with_experts, 1) * plan.global_batch)
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.balance: Any = None  # this rank's part of the balance loss, times no coefficient
        self.imbalances: list[float] = []  # rows of the busiest rank over the mean, by layer and micro-batch

    @property
    def imbalance(self) -> tuple[float, float]:
        """Mean and largest of `imbalances`; 0 where no experts are on other ranks."""
        return sum(self.imbalances) / max(1, len(self.imbalances)), max(self.imbalances, default=0.0)


@lru_cache
def _factors(count: int, factor: float) -> Any:
    return paddle.full([count], factor)


class LayerLoad:
    """The load of one layer's experts."""

    def __init__(self, load: Load, samples: Sequence[int], group: Any):
        """`samples`: of which sample of a micro-batch each of the rank's own tokens is. `group`: the ranks that
        together have all tokens of these samples."""
        self._load, self._samples, self._group = load, paddle.to_tensor(samples), group
        self._first = (self._samples * load.experts).unsqueeze(-1)  # [T, 1] of E places of each sample

    def add_imbalance(self, imbalance: float) -> None:
        """Rows of the busiest rank over the mean, of one micro-batch."""
        self._load.imbalances.append(imbalance)

    def shares(self, probabilities: Any, chosen: Any) -> Any:
        """E f_e / (S L G) [M, E] of each of M samples, by which a token's `probabilities` [T, E] count in the balance
        loss; None where it has no part. Only rows of samples of the rank's own tokens are right. `chosen` [T, k]: the
        experts of each of those tokens."""
        load = self._load
        if not load.coefficient:
            return None
        places = (self._first + chosen).reshape([-1, 1])
        shares = paddle.zeros([load.samples * load.experts])
        shares = paddle.scatter_nd_add(shares, places, _factors(places.shape[0], load.factor))
        shares = all_reduce(shares.reshape([load.samples, load.experts]), self._group)
        own = (shares.index_select(self._samples) * probabilities).sum()
        load.balance = own if load.balance is None else load.balance + own
        return shares

    def balanced(self, probabilities: Any, shares: Any) -> Any:
        """Identity on probabilities [T, E]; backward adds the balance loss's gradient."""
        return _Balanced.apply(probabilities, shares.index_select(self._samples), self._load)


class _Balanced(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, probabilities: Any, shares: Any, load: Load) -> Any:
        ctx.kept = shares, load
        return probabilities.view(probabilities.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        shares, load = ctx.kept
        return grad + load.coefficient * load.gradient_scale * shares
