"""How evenly the experts of a stage's layers get tokens: the balance loss, and the rows of the fullest rank."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from ..model import ModelShape
from ..plan import Plan
from .collectives import all_reduce


class Load:
    """Counts over the layers and micro-batches of a step.

    The balance loss of L layers and G samples of S tokens is 1 / (L G) times the sum over layers and samples of
    E · sum_e f_e P_e: f_e is the number of tokens that choose expert e over S, without a gradient, and P_e the mean of
    its probability. It is k at even load, as in transformers, where f and P are means over a whole batch. A mean over
    samples is one that no plan changes.
    """

    def __init__(self, plan: Plan, shape: ModelShape, seq_length: int, group: Any):
        """`group`: all ranks of the stage, which together have the tokens of every sample."""
        self.coefficient = shape.router_aux_loss_coef
        self.gradient_scale = 1.0  # fp16's
        self._group, self._samples, self._experts = group, plan.micro_batch, shape.experts
        self._factor = shape.experts / (seq_length**2 * shape.layers * plan.global_batch)
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.balance: Any = None  # this rank's part of the balance loss, times no coefficient
        self.imbalances: list[float] = []  # rows of the fullest rank over the mean, by layer and micro-batch

    @property
    def imbalance(self) -> tuple[float, float]:
        """Mean and largest of `imbalances`; 0 where no experts are on other ranks."""
        return sum(self.imbalances) / max(1, len(self.imbalances)), max(self.imbalances, default=0.0)

    def shares(self, probabilities: Any, chosen: Any, samples: Any) -> Any:
        """E f_e / (S L G) [M, E] of each of M samples, by which a token's probabilities count in the balance loss; None
        where it has no part. `samples` [T]: of which sample each of the rank's tokens is, `chosen` [T, k]: its
        experts."""
        if not self.coefficient:
            return None
        places = (samples.unsqueeze(-1) * self._experts + chosen).flatten()
        counts = paddle.zeros([self._samples * self._experts])
        counts = paddle.scatter_nd_add(counts, places.unsqueeze(-1), paddle.ones(places.shape))
        shares = all_reduce(counts.reshape([self._samples, self._experts]), self._group) * self._factor
        own = (shares.index_select(samples) * probabilities).sum()
        self.balance = own if self.balance is None else self.balance + own
        return shares


class Balanced(PyLayer):  # type: ignore[misc]
    """Probabilities [T, E] as they are. Their gradient has that of the balance loss, too."""

    @staticmethod
    def forward(ctx: Any, probabilities: Any, shares: Any, samples: Any, load: Load) -> Any:
        ctx.told = shares, samples, load
        return probabilities.view(probabilities.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        shares, samples, load = ctx.told
        return grad + load.coefficient * load.gradient_scale * shares.index_select(samples)
