"""Every kind of layer-wise plan trains as one process does: losses and each gradient, on real processes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity import case_weights, parity
from paddlenlp_galvatron.check.parity.parity import Case, check_parity, small_case
from paddlenlp_galvatron.plan import Precision

from . import plans
from .covering import chosen, covering
from .plan_words import in_16_bits

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# Further sizes of the smallest model of a family.
FURTHER = {
    "qwen3": {"attention_bias": True},
    "ernie4_5_moe": {"attention_bias": True, "mlp_bias": True},
    "llama": {
        "own_head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": (("rope_type", "llama3"), *LLAMA3.items()),
    },
}
A_LAUNCH = 40  # cases


def disagreements(cases: Sequence[Case]) -> list[str]:
    """A line for each case that does not train as one process."""
    launches = [cases[first : first + A_LAUNCH] for first in range(0, len(cases), A_LAUNCH)]
    results = [result for some in launches for result in check_parity(some, timeout_s=600)]
    return [
        f"{case.shape.name}, {case.plan.layers}: loss {result.max_loss_diff:.1e}, "
        f"gradient {result.max_grad_rel_diff:.1e} {result.worst_gradient}"
        for case, result in zip(cases, results, strict=True)
        if not result.agrees
    ]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_plans_train_as_one_process_does(ranks):
    by_gloo, _ = chosen()
    assert not disagreements([case.case() for case in by_gloo if case.plan.world_size == ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_every_plan_trains_as_one_process_does(ranks):
    assert not disagreements([case.case(4) for case in plans.EVERY if case.plan.world_size == ranks])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["by turns", "every"])
def test_biases_head_sizes_and_scaled_positions_train_as_one_process_does(every):
    """Each family by some plans, of which one has a tensor-parallel layer."""
    named = covering([*plans.FOUR, *plans.ZERO], 1.0 if every else 0.7)
    pairs = product(named, FURTHER) if every else zip(named, cycle(FURTHER))
    cases = [(replace(case, family=family).case(2), FURTHER[family]) for case, family in pairs]
    assert not disagreements([replace(case, shape=replace(case.shape, **sizes)) for case, sizes in cases])


def test_the_check_sees_a_gradient_that_is_off_by_a_thousandth(monkeypatch):
    case = small_case(plans.plan(1, "1 1"), "llama", steps=1)
    losses, gradients = parity._one_process(parity._data_only(case))
    name = "llama.layers.1.mlp.up_proj.weight"
    tampered = [{**gradients[0], name: gradients[0][name] * 1.001}]
    monkeypatch.setattr(parity, "_one_process", lambda _: (losses, tampered))
    [result] = check_parity([case])
    assert result.worst_gradient.startswith(name)
    assert result.max_grad_rel_diff == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(("precision", "factor"), [(Precision.FP32, 1.005), (Precision.BF16, 1.2)])
def test_the_check_sees_a_wrong_sum_in_one_layer(monkeypatch, precision, factor):
    """In bf16 what is above the rounding of single gradients."""

    class Wrong(case_weights.CaseWeights):
        def __call__(self, name, *where):
            return super().__call__(name, *where) * (factor if "layers.1.mlp.down_proj" in name else 1)

    case = small_case(in_16_bits(plans.plan(1, "1 1"), precision), "llama", steps=1, seed=1)
    [right] = check_parity([case])
    parity._one_process.cache_clear()
    monkeypatch.setattr(case_weights, "CaseWeights", Wrong)
    [wrong] = check_parity([case])
    parity._one_process.cache_clear()
    assert right.agrees and not wrong.agrees, (right, wrong)
