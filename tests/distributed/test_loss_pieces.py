"""Logits, losses and gradients by pieces of tokens: the same training as one process with all logits at once."""

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, check_parity, small_case
from paddlenlp_galvatron.plan import DataParallel, Plan, Precision, Schedule

from . import plans
from .plans import plan
from .test_deferred import disagreements
from .test_tuning import agrees


def by_pieces(of: Plan, pieces: int = 3) -> Plan:
    return replace(of, vocab=replace(of.vocab, pieces=pieces))


def case(of: Plan, family: str = "qwen2", optimizer: str = "sgd", pieces: int = 3, **how) -> Case:
    return small_case(by_pieces(of, pieces), family, optimizer, steps=2, **how)


def biased(case: Case) -> Case:
    """With a bias in the LM head, too."""
    return replace(case, shape=replace(case.shape, attention_bias=True, mlp_bias=True))


SP, PLAIN = {"vocab": "2"}, {"vocab": "2", "megatron_sp": False}
LATE = {"schedule": Schedule.GPIPE, "async_reduce": False}  # several in flight, each reduced by itself
# Odd pieces, and as many as tokens.
TWO = [
    case(plan(2, "1 2", **SP), "qwen2"),
    case(plan(2, "1 2", **PLAIN), "llama", "adamw", pieces=1000),
    case(plan(2, "1 1", (1, 1), micro_batches=4), tied=True),
    case(plan(2, "1 1", micro_batches=4, default=DataParallel.ZERO2, async_reduce=False), tied=True),
    case(plan(2, "1 1r 1 1 1", (1, 2, 1, 1), chunks=2, micro_batches=4), "llama", "adamw"),
    case(plans.in_16_bits(plan(2, "1 2", **SP))),
    biased(case(plan(2, "1 2", **SP), "ernie4_5_moe", tied=True)),
    biased(case(plan(2, "1 1", (1, 1), micro_batches=4, **LATE), "ernie4_5_moe", "adamw")),
    case(plans.in_16_bits(plan(2, "1 1", (1, 1)), Precision.FP16), tied=True),
]
FOUR = [
    case(plan(4, "1z 2", (1, 1), vocab="2z", micro_batches=4), "qwen2", "adamw"),
    case(plan(4, "1z 1 2", vocab="2uz", megatron_sp=False), "llama"),
    case(plan(4, "1c2 2", vocab="2c2", default=DataParallel.ZERO2), "qwen2", tied=True),
    case(plan(4, "1 2 1", (2, 1), vocab="2", micro_batches=3, batch=6, **LATE), "qwen2", "adamw", tied=True),
    case(plan(4, "1z 2zr 1 2", (1,) * 4, chunks=2, vocab="1z", micro_batches=3, batch=12), "llama", tied=True),
]
# Packed rows, adapters and pairs of answers, also of ranks that share a sample.
TUNED = [
    case(plan(2, "1 2", **SP), packed=True),
    case(plan(2, "1 2", **PLAIN), lora_rank=3),
    case(plan(2, "1 2", **SP), loss="sigmoid"),
    case(plan(2, "1 1", (1, 1), micro_batches=4, async_reduce=False), loss="simpo", tied=True),
    case(plan(2, "2u 1", vocab="2u", megatron_sp=False), "llama", loss="ipo"),
    case(plan(2, "1 2", **SP), "llama", loss="sigmoid", lora_rank=3),
]
MORE = [
    case(plan(6, "3 6r 2 1", vocab="3", batch=12), "llama", tied=True),
    case(plan(8, "1 4r 2 1", (2, 2), vocab="4", micro_batches=4, batch=16), "qwen2", "adamw"),
]


@pytest.mark.parametrize("cases", [TWO, TUNED], ids=["plans", "tuning"])
def test_two_ranks_train_as_one_process_does(cases):
    results = check_parity(cases)
    assert all(agrees(result) for result in results), results


def test_four_ranks_do_so_as_late_as_a_gpu_may(tmp_path):
    assert not disagreements(tmp_path, FOUR, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=["6 ranks", "8 ranks"])
def test_more_ranks_do_so(case):
    [result] = check_parity([case])
    assert agrees(result), result
