"""In one process: fp32 values stay in fp32 under 16 bits, a type that a CPU lacks is refused, and a recomputed layer
sees its dropout mask again (test_states.py: ranks draw masks of their own)."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup

from .plans import plan

CASE = small_case(plan(1, "1 1", micro_batches=64, batch=64), "llama")


def engine(precision: Precision, fp32_gradients: bool = False, micro_batches: int = 64, **given) -> Engine:
    assumed = replace(CASE.plan.assumed, mixed_precision=precision, fp32_gradients=fp32_gradients)
    of = replace(CASE.plan, assumed=assumed, micro_batches=micro_batches)
    return Engine(ModelSetup.of(of, CASE.shape, CASE.seq_length, **given))


def gradients(precision: Precision, **given) -> list[np.ndarray]:
    made = engine(precision, **given)
    made.forward_backward(batch_of(CASE, 0))
    return [trainable.gradient.astype("float32").numpy() / made.gradient_scale for trainable in made.trainables]


def distance(some: list[np.ndarray], exact: list[np.ndarray]) -> float:
    return float(np.mean([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(some, exact, strict=True)]))


def test_gradients_of_many_micro_batches_are_as_near_to_the_exact_ones_as_that_of_one_where_they_are_summed_in_fp32():
    exact = gradients(Precision.FP32)
    in_bf16, in_fp32 = gradients(Precision.BF16), gradients(Precision.BF16, fp32_gradients=True)
    of_one = gradients(Precision.BF16, fp32_gradients=True, micro_batches=1)
    assert distance(in_fp32, exact) < 1.05 * distance(of_one, exact) < 1e-2
    assert distance(in_bf16, exact) > 1.3 * distance(in_fp32, exact)


def test_updates_too_small_for_bf16_add_up_in_the_masters():
    made = engine(Precision.BF16)
    optimizer = paddle.optimizer.SGD(1e-4, parameters=made.tensors)
    made.forward_backward(batch_of(CASE, 0))
    gradient = [trainable.gradient.astype("float32") for trainable in made.trainables]
    before = [tensor.numpy().copy() for tensor in made.tensors]
    for _ in range(3):
        for trainable, value in zip(made.trainables, gradient, strict=True):
            trainable.owner.summed = value.astype("bfloat16")
        norm = made.update(optimizer, max_norm=float("inf"))
    assert np.isfinite(norm)
    for tensor, old, value in zip(made.tensors, before, gradient, strict=True):
        assert tensor.dtype == paddle.float32
        np.testing.assert_allclose(tensor.numpy(), old - 3e-4 * value.numpy(), rtol=1e-5, atol=1e-8)
    for trainable in made.trainables:
        weight = trainable.pieces[0].weight.tensor
        assert weight.dtype == paddle.bfloat16
        assert (weight == trainable.tensor.astype("bfloat16")).all()


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_16_bit_arithmetic_is_refused_on_cpu(precision):
    with pytest.raises(UserError, match=f"compute_precision: Paddle has no {precision} arithmetic on CPU"):
        engine(precision, compute_precision=precision)


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
