"""Fine-tuning under any plan: rows of several documents train what each document alone trains in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.proof.parity import check_parity, small_case

from . import plans

# Of each axis, each kind of sharding and recompute one, always with a plain tp layer among them.
TWO = ["tp 1-2 without Megatron-SP", "parts, tp with Megatron-SP", "2 chunks, tied, reduced every micro-batch"]
FOUR = [
    "Ulysses, tp and dp mixed",
    "strided tp without Megatron-SP",
    "zero3 in a pipeline",
    "one kv head, tp without Megatron-SP, zero3",
    "cp beside tp without Megatron-SP",
    "cp beside Ulysses",
    "cp, parts, 3 chunks, zero2",
    "fewer kv heads than Ulysses",
]


def named(names, *lists) -> list[plans.Named]:
    found = {one.name: one for every in lists for one in every}
    return [found[name] for name in names]


def require_parity(cases, **how):
    made = [small_case(one.plan, one.family, "sgd", 2, tied=one.tied, kv_heads=one.kv_heads, **how) for one in cases]
    results = check_parity(made, timeout_s=500)
    wrong = [
        f"{case.name}: loss {result.max_loss_diff:.1e}, gradient {result.max_grad_rel_diff:.1e} {result.worst_gradient}"
        for case, result in zip(cases, results, strict=True)
        if not result.agrees
    ]
    assert not wrong, "\n".join(wrong)


def test_packed_rows_on_two_ranks():
    require_parity(named(TWO, plans.TWO, plans.PARTS_TWO, plans.INTERLEAVED_TWO), packed=True)


def test_packed_rows_on_four_ranks():
    require_parity(named(FOUR, plans.FOUR, plans.ZERO, plans.CONTEXT_FOUR), packed=True)
