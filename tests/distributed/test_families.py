"""Families with own head sizes, norms of q and k, biases and scaled positions, under every kind of plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, check_parity, small_case

from . import plans
from .plans import Named

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# Further sizes of the smallest model of a family.
FURTHER = {
    "qwen3": {"attention_bias": True},
    "llama": {
        "own_head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": (("rope_type", "llama3"), *LLAMA3.items()),
    },
}
PLANS = [*plans.FOUR, *plans.ZERO]
QUICK = {
    "qwen3": ("tp 1-2-4 without Megatron-SP", "tied across stages", "fewer kv heads than tp", "zero3 over Ulysses"),
    "llama": ("tp 1-2-4 with Megatron-SP", "Ulysses, tp and dp mixed", "zero3 with ddp"),
}


def case_of(named: Named, family: str) -> Case:
    case = small_case(named.plan, family, steps=2, tied=named.tied, kv_heads=named.kv_heads)
    return replace(case, shape=replace(case.shape, **FURTHER[family]))


def disagreements(cases: list[Case]) -> list[str]:
    return [
        f"{case.shape.name}, {case.plan.layers}: loss {result.max_loss_diff:.1e}, "
        f"gradient {result.max_grad_rel_diff:.1e} {result.worst_gradient}"
        for case, result in zip(cases, check_parity(cases, timeout_s=550), strict=True)
        if not result.agrees
    ]


def test_families_train_as_one_process_does():
    assert not disagreements([case_of(p, family) for family, names in QUICK.items() for p in PLANS if p.name in names])


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_every_plan_trains_every_family(family):
    assert not disagreements([case_of(named, family) for named in PLANS])
