"""Measures how long some experts of a layer compute on one rank, and fits the times of `profiles.experts` to that.

All behind the router is measured, without messages: the order of the rows, their copies, the products, and the sum of
each token. A few experts tell the time of many, so that a whole layer of them is never made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from scipy.optimize import nnls

from ..plan import LayerStrategy, ModelShape, Precision
from ..profiles import PassKey, PassTimes
from ..profiles.experts import ExpertPass, ExpertTimes
from ..runtime.experts import PRODUCTS, OwnExperts
from ..runtime.precision import Numbers, compute_weights
from ..runtime.weights import WHOLE, ShardedParameter, make_parameter
from .part import CheapWeights

EXPERTS = "experts"  # first word of such a part; its number of experts follows
COUNTS = 1, 2, 4
SHARES = 16, 4, 1  # of a micro-batch's tokens, the parts that are measured: from few rows an expert to many


def expert_keys(shape: ModelShape, tokens: int, degrees: Sequence[int]) -> list[PassKey]:
    """Points at which a layer's experts are measured: some of them, with one sample of some length. The least and the
    largest degree of tensor parallelism are enough, as what is split falls with the degree."""
    splits = [degree for degree in degrees if shape.expert_size % degree == 0]
    return [
        PassKey(f"{EXPERTS}{count}", 1, length, degree)
        for degree in dict.fromkeys((splits[0], splits[-1]))
        for count in COUNTS
        for length in dict.fromkeys(max(tokens // share, 1) for share in SHARES)
        if count <= shape.experts
    ]


def is_of_experts(part: str) -> bool:
    """Whether the part of a key is some experts."""
    return part.startswith(EXPERTS)


def _count(key: PassKey) -> int:
    return int(key.part.removeprefix(EXPERTS))


class ExpertsPart:
    """Some experts of a layer on one of the ranks that split each, with equally many rows each. `forward` and
    `backward` alternate; gradients are added up, as those of the micro-batches of a step."""

    def __init__(self, shape: ModelShape, key: PassKey, precision: Precision):
        """`key`: one of `expert_keys`."""
        count, inner = _count(key), shape.expert_size // key.tp
        self._numbers = numbers = Numbers.of(precision)
        load: Any = None  # counts what a router chooses
        own = replace(shape, experts=count, expert_size=inner)
        self._experts = OwnExperts(own, LayerStrategy().experts, None, numbers, load, [0])
        self._slots = []
        source = CheapWeights(shape.initializer_range)
        for name in PRODUCTS:
            size = (inner, shape.hidden_size) if name == "down" else (shape.hidden_size, inner)
            tensor = make_parameter(source, name, (count, *size), WHOLE, numbers.stored)
            setattr(self._experts.layer, name, tensor)
            record = ShardedParameter(name, tuple(tensor.shape), WHOLE, tensor, None, 1, numbers.gradients)
            self._slots.append((self._experts.layer, name, record))
        rows = [key.batch * key.seq, shape.experts_per_token]
        self._chosen = (paddle.arange(rows[0] * rows[1]) % count).reshape(rows)
        self._scores = paddle.full(rows, 1 / rows[1])
        self._x, self._returned = (
            paddle.randn([rows[0], shape.hidden_size]).astype(numbers.computed) for _ in range(2)
        )
        self._out: Any = None

    def forward(self) -> None:
        """One micro-batch."""
        x, scores = self._x.detach(), self._scores.detach()
        x.stop_gradient = scores.stop_gradient = False
        with compute_weights(self._slots, self._numbers):
            self._out = self._experts.weighted(x, scores, {"chosen": self._chosen})

    def backward(self) -> None:
        paddle.autograd.backward([self._out], [self._returned])
        for *_, weight in self._slots:
            weight.accumulate_autograd()
        self._out = None


def expert_times(
    measured: Mapping[PassKey, PassTimes], launched: Mapping[PassKey, PassTimes], per_token: int
) -> dict[int, ExpertTimes]:
    """Times by the number of ranks that split each expert, from those measured. `launched`: of the host, whatever the
    rows. `per_token`: experts, and so rows, of a token."""
    launch = fitted([(_count(key), 0, (ms.forward_ms + ms.backward_ms) / 2) for key, ms in launched.items()])

    def of(degree: int) -> ExpertTimes:
        points = [
            (_count(key), key.batch * key.seq * per_token, ms.forward_ms, ms.backward_ms)
            for key, ms in measured.items()
            if key.tp == degree
        ]
        forward = fitted([(count, rows, ms) for count, rows, ms, _ in points])
        return ExpertTimes(forward, fitted([(count, rows, ms) for count, rows, _, ms in points]), launch)

    return {degree: of(degree) for degree in sorted({key.tp for key in measured})}


def fitted(points: Sequence[tuple[int, int, float]]) -> ExpertPass:
    """The times of a pass, none below zero, with the least squares of relative errors at points (experts, rows, ms)."""
    if not points:
        return ExpertPass()
    experts, rows, ms = np.array(points, float).T
    found, _ = nnls(np.stack([np.ones(len(ms)), experts, rows], axis=1) / ms[:, None], np.ones(len(ms)))
    return ExpertPass(*found.tolist())
