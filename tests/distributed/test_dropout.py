"""Dropout: a recomputed layer sees its mask again. test_states.py shows that ranks draw masks of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup

from .plans import plan


def step(code: str, dropout: float, seed: int = 0) -> tuple[float, list[float]]:
    """Loss and sums of the gradients of a step in one process."""
    case = small_case(plan(1, code), "qwen2")
    shape = replace(case.shape, attention_dropout=dropout)
    engine = Engine(ModelSetup.of(case.plan, shape, case.seq_length, seed=seed))
    loss = engine.forward_backward(batch_of(case, 0))
    return loss, [float(trainable.gradient.abs().sum()) for trainable in engine.trainables]


@pytest.mark.parametrize("code", ["1r 1r 1r", "1a 1nam 1am"])
def test_a_recomputed_layer_sees_the_same_mask(code):
    plain, recomputed = step("1 1 1", 0.5), step(code, 0.5)
    assert recomputed[0] == plain[0]
    assert recomputed[1] == pytest.approx(plain[1], rel=1e-5)
    assert step("1 1 1", 0.0)[0] != plain[0]
