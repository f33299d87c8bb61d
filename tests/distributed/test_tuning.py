"""Fine-tuning under any plan: rows of several documents train as each document alone does in one process."""

from dataclasses import replace
from typing import get_args

import pytest

pytest.importorskip("paddle")

from random_cases import random_cases

from paddlenlp_galvatron.check.parity.parity import Case, Parity, check_parity, small_case
from paddlenlp_galvatron.model.preference import Loss
from paddlenlp_galvatron.plan import Precision

from . import plans
from .test_deferred import disagreements

# One of each axis, each kind of sharding and recompute, always with a plain tp layer among them. Each of four ranks'
# plans has packed rows, pairs or adapters by turns; in long tests all three.
TWO = ["tp 1-2 without Megatron-SP", "parts, tp with Megatron-SP", "2 chunks, tied, reduced every time"]
FOUR = [
    "Ulysses, tp and dp mixed", "strided tp without Megatron-SP", "two kv heads on four ranks, no Megatron-SP, zero3",
    "zero3 in a pipeline", "cp with tp without Megatron-SP", "cp with Ulysses", "cp, parts, chunks",
    "fewer kv heads than Ulysses", "in parts over Ulysses and cp", "zero2 and zero3 in parts",
]  # fmt: skip


OF_TWO = plans.TWO, plans.PARTS_TWO, plans.INTERLEAVED_TWO
OF_FOUR = plans.FOUR, plans.ZERO, plans.CONTEXT_FOUR, plans.HYBRID_FOUR
LOSSES = get_args(Loss)


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a third", "all"])


def cases(names, lists, **how) -> list[Case]:
    found = {one.name: one for every in lists for one in every}
    chosen = [found[name] for name in names]
    return [small_case(one.plan, one.family, "sgd", 2, tied=one.tied, kv_heads=one.kv_heads, **how) for one in chosen]


def preferences(names, lists) -> list[Case]:
    """Each plan with another loss of pairs, every second one with adapters."""
    found = cases(names, lists)
    return [replace(case, loss=LOSSES[n % len(LOSSES)], lora_rank=3 * (n % 2)) for n, case in enumerate(found)]


def test_packed_rows_and_pairs_on_two_ranks():
    one = small_case(plans.plan(2, "1 1", micro_batches=2, batch=4), "qwen2", "sgd", 2)
    every = [replace(one, loss=loss) for loss in LOSSES]
    results = check_parity([*cases(TWO[::2], OF_TWO, packed=True), *preferences(TWO, OF_TWO), *every])
    assert all(agrees(result) for result in results), results


def agrees(result: Parity) -> bool:
    """Some losses of pairs begin near 10, where fp32 rounds ten times as coarsely as near 1."""
    loss, gradient = result.limits
    largest = max(1.0, *map(abs, result.losses_one_process))
    return result.max_loss_diff <= loss * largest and result.max_grad_rel_diff <= gradient


@EVERY
def test_packed_rows_and_pairs_on_four_ranks(tmp_path, every):
    """As late as a GPU may do all of it, and without a word between host and device."""
    found = cases(FOUR if every else FOUR[::3], OF_FOUR, packed=True)
    found += preferences(FOUR if every else FOUR[1::3], OF_FOUR)
    assert not disagreements(tmp_path, found, seed=3)


def test_adapters_on_two_ranks():
    """Against PaddleNLP's own LoRAModel, which sees every document alone."""
    bf16 = plans.plan(2, "1z 2r 2na", vocab="2", megatron_sp=False)
    first = plans.plan(2, "1zr 1z 2", megatron_sp=False)  # a frozen first layer that backward must gather again
    bf16 = replace(bf16, assumed=replace(bf16.assumed, mixed_precision=Precision.BF16))
    results = check_parity(
        [
            *cases(TWO[1:], OF_TWO, packed=True, lora_rank=3),
            small_case(bf16, "qwen2", "sgd", 1, packed=True, lora_rank=3),
            small_case(first, "llama", "sgd", 2, packed=True, lora_rank=3),
        ]
    )
    assert not [result for result in results if not result.agrees]


@EVERY
def test_adapters_on_four_ranks(tmp_path, every):
    found = cases(FOUR if every else FOUR[2::3], OF_FOUR, packed=True, lora_rank=3)
    assert not disagreements(tmp_path, found, seed=4)


def turns(case: Case, number: int) -> list[Case]:
    """Adapters on packed rows, pairs with adapters, adapters alone, pairs alone; MTP trains on no pairs."""
    loss = LOSSES[number % len(LOSSES)]
    kinds = [{"packed": True, "lora_rank": 3}, {"loss": loss, "lora_rank": 3}, {"lora_rank": 3}, {"loss": loss}]
    return [replace(case, **kind) for kind in kinds[:: 2 if case.shape.mtp_layers else 1]]


@pytest.mark.parametrize(
    ("named", "step"),
    [
        pytest.param(
            [*plans.EXPERTS_TWO[:2], plans.EXPERTS_TWO[4], plans.LATENT_TWO[0], plans.MTP_TWO[2]], 4, id="two"
        ),
        pytest.param(
            [plans.EXPERTS_FOUR[1], plans.EXPERTS_LATE[3], plans.KINDS_FOUR[1], *plans.ERNIE[1:3]], 4, id="four"
        ),
        pytest.param(plans.EXPERTS_FOUR + plans.LATENT_FOUR + plans.MTP_FOUR, 2, id="more", marks=pytest.mark.slow),
    ],
)
def test_experts_learn_by_adapters_and_from_pairs(named, step):
    """Each plan by one of four turns, or by two."""
    found = []
    for number, of in enumerate(named):
        kinds = turns(of.case(2), number)
        found += kinds[number % min(step, len(kinds)) :: step]
    results = check_parity(found, timeout_s=580)
    assert not [result for result in results if not agrees(result)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_random_plans_train_packed_rows_pairs_and_adapters(world_size):
    """By turns: packed rows, adapters on them, pairs, adapters on pairs."""
    drawn = [case for case in random_cases(24, world_size, seed=6, steps=2) if case.optimizer == "sgd"]
    turns = [{"packed": True}, {"packed": True, "lora_rank": 2}, {}, {"lora_rank": 2}]
    found = [replace(case, **turns[number % 4]) for number, case in enumerate(drawn)]
    found = [
        case if case.packed else replace(case, loss=LOSSES[number // 2 % len(LOSSES)])
        for number, case in enumerate(found)
    ]
    results = check_parity(found, timeout_s=580)
    assert not [result for result in results if not result.agrees]
