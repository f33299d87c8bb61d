"""The loss of pairs: from losses of tokens to log-probabilities of answers, to what `model.preference` says of them.

Shapes: U tokens of this rank, R rows that are told of, P pairs of a row.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn.functional import log_sigmoid, relu

from ..model.preference import BY_TOKEN, Preference
from ..plan.comm_points import Op
from .ops import Crossing


def pair_losses(preference: Preference, policy: Any, reference: Any) -> Any:
    """Losses of pairs [...]; log-probabilities [..., 2] of the chosen and the rejected answer, means of BY_TOKEN's."""
    beta, smoothing = preference.beta, preference.label_smoothing
    chosen, rejected = policy.unbind(-1)
    gained, lost = (policy - reference).unbind(-1)
    margin = gained - lost
    match preference.loss:
        case "hinge":
            return relu(1 - beta * margin)
        case "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        case "dpop":
            return -log_sigmoid(beta * margin) + preference.dpop_lambda * relu(-gained)
        case "sppo_hard":
            return (gained - 0.5 / beta) ** 2 + (lost + 0.5 / beta) ** 2
        case "nca_pair":
            return -log_sigmoid(beta * gained) - 0.5 * (log_sigmoid(-beta * gained) + log_sigmoid(-beta * lost))
        case "or":
            odds = paddle.log1p(-paddle.exp(chosen)) - paddle.log1p(-paddle.exp(rejected))
            return -log_sigmoid(chosen - rejected - odds)
        case "simpo":
            margin = margin - preference.simpo_gamma / beta
    return -log_sigmoid(beta * margin) * (1 - smoothing) - log_sigmoid(-beta * margin) * smoothing


class PairLoss:
    """Sums up what a loss layer's tokens say of pairs. `group`: ranks among which some have other tokens of the same
    answers; None: each rank has all tokens of its rows."""

    def __init__(self, preference: Preference, group: Any):
        self._preference, self._group = preference, group
        self.sums: list[Any] = []  # of each pass without gradients since the last `clear`: [R, P, 2]

    @property
    def is_shared(self) -> bool:
        """Whether sums are those of a group, whose ranks must number answers alike."""
        return self._group is not None

    def __call__(self, losses: Any, answers: Any, pairs: Any) -> tuple[Any, Any]:
        """Scalar: sum over the pairs that there are, and those of METRICS.

        `losses` [U] fp32 of tokens, `answers` [U]: which of the 2·R·P answers each is of. `pairs` [R, P, 5] as
        `Samples` has them, and what a token of a chosen answer counts beside a pair.
        """
        rows, most, _ = pairs.shape
        # Not a product, which TF32 would round, nor a scatter, whose order of addition changes from run to run.
        mine = answers.unsqueeze(-1) == paddle.arange(rows * most * 2, dtype=answers.dtype)
        sums = -paddle.where(mine, losses.unsqueeze(-1), paddle.zeros([], losses.dtype)).sum(0)
        if self._group is not None:
            sums = Crossing.apply(sums, Op.REDUCE, self._group)
        policy = sums.reshape([rows, most, 2])
        if not paddle.is_grad_enabled():
            self.sums.append(policy)
        reference, counts, told = pairs[..., :2], pairs[..., 2:4], self._preference
        exists = counts[..., 0] > 0
        policy = paddle.where(exists.unsqueeze(-1), policy, paddle.full([], -1.0))  # whose loss has a gradient
        chosen_sums = policy[..., 0]
        if told.loss in BY_TOKEN:
            policy, reference = policy / counts.clip(1), reference / counts.clip(1)
        each = told.ratio * pair_losses(told, policy, reference)
        if told.sft_ratio:
            each = each - told.sft_ratio * pairs[..., 4] * chosen_sums
        rewards = told.beta * (policy - reference).detach()
        chosen, rejected = rewards.unbind(-1)
        right = (chosen > rejected).astype("float32")
        shown = [chosen, rejected, right, chosen - rejected, *policy.detach().unbind(-1)]
        weight = exists.astype("float32")
        return (each * weight).sum(), paddle.stack([(one * weight).sum() for one in shown])
