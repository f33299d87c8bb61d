"""Preference losses: make the chosen of two answers to a question likelier and the rejected one less likely.

PaddleNLP's losses of a pair's sums of log-probabilities. p and q: the policy's of the chosen and of the rejected
answer; r and s: the reference's; m = (p - q) - (r - s).
"""

from dataclasses import dataclass
from typing import Literal

Loss = Literal["sigmoid", "hinge", "ipo", "dpop", "sppo_hard", "nca_pair", "simpo", "or"]
WITHOUT_REFERENCE = ("simpo", "or")  # losses that have none
BY_TOKEN = ("ipo", "simpo", "or")  # losses of means over an answer's tokens, not of sums
# Means over the pairs of a step: rewards are beta times the difference of policy and reference.
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",  # share of pairs in which the chosen answer's reward is larger
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True)
class Preference:
    """The loss of pairs of answers."""

    loss: Loss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0  # assumed share of swapped pairs
    ratio: float = 1.0  # weight of the pairs' loss
    sft_ratio: float = 0.0  # of the loss of a chosen answer's token, which is added
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0
    reference_free: bool = False  # r = s = 0

    @property
    def has_reference(self) -> bool:
        return not self.reference_free and self.loss not in WITHOUT_REFERENCE
