"""Experts shared out and split among ranks train as one process does, next to every other dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.check.parity import parity
from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.check.parity.parity import Case, batch_of, small_case
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.runtime import experts
from paddlenlp_galvatron.runtime.adapters.mixture import MixtureLayer
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.weights import SeededWeights
from paddlenlp_galvatron.training.paddlenlp.surface import LocalModel

from . import plans
from .test_parity import disagreements

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
CHOOSE, CHOSEN = experts.choose, MixtureLayer._chosen
NEAR = 0.01  # distance of two experts' probabilities that rounding to bf16 can turn round; seen was 1.4e-3


def test_packed_rows_of_models_with_experts_train_as_one_process_does():
    assert not disagreements([replace(of.case(), packed=True) for of in (plans.EXPERTS_LATE[0], plans.KINDS_FOUR[1])])


class Routers:
    """Notes each router's choices, layer by layer: probabilities [T, E] and experts [T, k]. With those of another
    run it chooses as there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, as_in: Routers | None = None):
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []

        def note(scores: np.ndarray, chosen: Any) -> Any:
            if as_in is not None:
                chosen = paddle.to_tensor(as_in.seen[len(self.seen)][1].reshape(chosen.shape))
            self.seen.append((scores.reshape(-1, scores.shape[-1]), chosen.numpy().reshape(-1, chosen.shape[-1])))
            return chosen

        monkeypatch.setattr(
            experts, "choose", lambda scores, bias, shape: note(scores.numpy(), CHOOSE(scores, bias, shape))
        )
        monkeypatch.setattr(MixtureLayer, "_chosen", lambda self, scores: note(scores, CHOSEN(self, scores)))


def one_process(case: Case) -> dict[str, np.ndarray]:
    """Gradients of the first step."""
    source = SeededWeights(case.seed, case.shape.initializer_range)
    [(_, gradients)] = train_one_process(case.shape, case.seq_length, source, case.recipe, [batch_of(case, 0)])
    return gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_sends_tokens_to_other_experts_only_where_two_nearly_tie(monkeypatch, family):
    """And with the routing of fp32 its gradients are those of fp32."""
    case = small_case(plans.plan(1, "1 1 1", micro_batches=1), family, steps=1, vocabulary=plans.WORDS, seed=3)
    exact = Routers(monkeypatch)
    gradients = one_process(case)
    rounded = Routers(monkeypatch)
    engine(case).forward_backward(batch_of(case, 0))
    moved = tokens = 0
    for (probabilities, chosen), (_, others) in zip(exact.seen, rounded.seen, strict=True):
        *_, third, second, _ = np.sort(probabilities).T
        elsewhere = (np.sort(chosen) != np.sort(others)).any(axis=1)
        moved, tokens = moved + elsewhere.sum(), tokens + len(elsewhere)
        assert ((second - third)[elsewhere] < NEAR).all()
    assert 0 < moved < 0.01 * tokens
    Routers(monkeypatch, as_in=exact)
    made = engine(case)
    made.forward_backward(batch_of(case, 0))
    limit = parity.TOLERANCES[Precision.BF16]
    for trainable in made.trainables:
        found = trainable.gradient.astype("float32").numpy().flatten()
        for piece in trainable.pieces:
            expected = gradients[piece.weight.name].flatten()
            distance = np.abs(found[piece.offset :][: piece.stop] - expected).max()
            assert distance < limit * np.abs(expected).max(), piece.weight.name


def test_callbacks_find_each_expert_by_its_name():
    """The runtime holds them stacked."""
    case = small_case(plans.plan(1, "1"), "mixtral")
    made = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length, seed=case.seed))
    found, source = LocalModel(made.stage).state_dict(), SeededWeights(case.seed, case.shape.initializer_range)
    of_experts = [name for name in found if ".experts." in name]
    assert len(of_experts) == 3 * case.shape.experts
    for name in of_experts:
        assert (found[name].numpy() == source(name, tuple(found[name].shape))).all()


def engine(case: Case) -> Engine:
    """The losses of the case in bf16."""
    return Engine(ModelSetup.of(plans.in_16_bits(case.plan), case.shape, case.seq_length, seed=case.seed))
