"""The experts of each token, and their scores. Shapes: T tokens, E experts, k of them a token.

Softmax scores, or sigmoids whose sum over the chosen ones is 1 (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16). A
token's experts are the best of all, or the best within some groups of experts, so that it goes to few devices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import paddle
from paddle import nn

from ..model import ModelShape

LEAST_SUM = 1e-20  # of a token's sigmoids, as in transformers
BEST_OF_GROUP = 2  # sigmoids that a group is judged by; softmax scores: the best alone
LOWEST = -1e30  # far below every score, while sums of two are finite


def score(logits: Any, shape: ModelShape) -> Any:
    """Scores [T, E] of logits in fp32."""
    return nn.functional.sigmoid(logits) if _sigmoid(shape) else nn.functional.softmax(logits, axis=-1)


def choose(scores: Any, bias: Any, shape: ModelShape) -> Any:
    """Numbers of each token's experts [T, k], of scores [T, E]. `bias` [E] counts in the choice alone; None: none.

    A GPU's top-k has -1 for the places of NaN, so that all scores are numbers here: a loss of NaN is reported at the
    end of its step, which all ranks reach."""
    ranked = paddle.fmax(scores if bias is None else scores + bias, _in_turn(*scores.shape, shape.experts_per_token))
    if shape.expert_groups > 1:
        size = shape.experts // shape.expert_groups
        groups = ranked.reshape([-1, shape.expert_groups, size])
        best = paddle.topk(groups, min(BEST_OF_GROUP, size) if _sigmoid(shape) else 1, axis=-1)[0].sum(-1, keepdim=True)
        least = paddle.topk(best, shape.groups_per_token, axis=1)[0][:, -1:]  # of the groups that are kept
        ranked = paddle.where(best >= least, groups, paddle.full([], -float("inf"))).reshape(scores.shape)
    return paddle.topk(ranked, shape.experts_per_token, axis=-1)[1]


@lru_cache
def _in_turn(tokens: int, experts: int, chosen: int) -> Any:
    """Ranks below every score [T, E], in place of NaN: tokens take experts in turn, so that no rank gets all rows."""
    first = (paddle.arange(tokens) * chosen).unsqueeze(-1)
    return LOWEST * (1 + ((paddle.arange(experts) - first) % experts).astype("float32") / experts)


def shares(scores: Any, chosen: Any, shape: ModelShape) -> Any:
    """The weights [T, k] of a token's experts in their sum."""
    own = paddle.take_along_axis(scores, chosen, -1, broadcast=False)
    if shape.norm_topk:
        total = own.sum(-1, keepdim=True)
        own = own / (total + LEAST_SUM if _sigmoid(shape) else total)
    return own if shape.routed_scaling_factor == 1 else own * shape.routed_scaling_factor


def _sigmoid(shape: ModelShape) -> bool:
    return bool(shape.traits.mixture and shape.traits.mixture.sigmoid)
