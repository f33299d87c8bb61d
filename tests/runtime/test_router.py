"""A token's experts: chosen as one token after the other would choose, with the weights of transformers' formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from distributed import twins
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.runtime import router

V2, V3 = load_model("deepseek-v2"), load_model("deepseek-v3")


@st.composite
def cases(draw):
    """A shape, scores [T, E] and, of sigmoids, a bias of both signs [E]."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kept = draw(st.integers(1, groups))
    sizes = {"experts": groups * size, "expert_groups": groups, "groups_per_token": kept}
    shape = replace(
        draw(st.sampled_from((V2, V3))),
        experts_per_token=draw(st.integers(1, kept * size)),
        norm_topk=draw(st.booleans()),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = random.random((draw(st.integers(1, 6)), groups * size)).astype(np.float32)
    bias = random.normal(0, 1, groups * size).astype(np.float32) if shape.family == "deepseek_v3" else None
    return replace(shape, **sizes), scores, bias


@given(cases())
def test_the_best_experts_of_the_best_groups_are_chosen(case):
    shape, scores, bias = case
    chosen = router.choose(paddle.to_tensor(scores), None if bias is None else paddle.to_tensor(bias), shape)
    weights = router.shares(paddle.to_tensor(scores), chosen, shape).numpy()
    ranked, size = scores if bias is None else scores + bias, shape.experts // shape.expert_groups
    for token, row in enumerate(ranked):
        parts = row.reshape([-1, size])
        worth = np.sort(parts)[:, -2 if bias is not None else -1 :].sum(-1)
        kept = np.argsort(-worth)[: shape.groups_per_token]
        inside = [expert for expert in range(shape.experts) if expert // size in kept]
        best = sorted(inside, key=lambda expert: -row[expert])[: shape.experts_per_token]
        assert set(chosen[token].tolist()) == set(best)
        own = scores[token][chosen[token].numpy()]  # without the bias
        total = own.sum() if shape.norm_topk else 1
        np.testing.assert_allclose(weights[token], shape.routed_scaling_factor * own / total, rtol=1e-5)


def test_scores_are_sigmoids_or_sum_to_one():
    logits = paddle.to_tensor([[0.0, 1.0, -1.0]])
    assert float(router.score(logits, V2).sum()) == pytest.approx(1)
    np.testing.assert_allclose(router.score(logits, V3).numpy(), [[0.5, 0.7310586, 0.2689414]], rtol=1e-6)


@pytest.fixture(scope="module", params=["on CPU", "on a GPU"])
def kernel(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "on a GPU":
            patch.setattr(paddle._C_ops, "topk", twins.topk)
        yield


@pytest.mark.usefixtures("kernel")
@given(cases(), st.integers(0, 2**32))
def test_a_token_of_nan_has_experts_and_changes_none_of_others(case, seed):
    shape, scores, bias = case
    marks = np.random.default_rng(seed).random(scores.shape) < 0.2
    marks[0] = seed % 2
    poisoned = paddle.to_tensor(np.where(marks, np.nan, scores))
    bias = None if bias is None else paddle.to_tensor(bias)
    chosen = router.choose(poisoned, bias, shape).numpy()
    for token, before in enumerate(router.choose(paddle.to_tensor(scores), bias, shape).numpy()):
        assert len({*chosen[token]}) == shape.experts_per_token
        if not marks[token].any():
            np.testing.assert_array_equal(chosen[token], before)
    assert chosen.min() >= 0 and chosen.max() < shape.experts


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [V2, V3], ids=["softmax, groups", "sigmoids, groups"])
def test_tokens_of_nan_use_all_experts_alike(shape):
    tokens = 512
    chosen = router.choose(paddle.full([tokens, shape.experts], float("nan")), None, shape).numpy()
    counts = np.bincount(chosen.ravel(), minlength=shape.experts)
    assert counts.max() <= 2 * counts.mean()
