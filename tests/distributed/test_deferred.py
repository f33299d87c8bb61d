"""The same plans under a backend that does everything as late as it may, without a word between host and device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from deferred import require_same_calls

from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.proof.parity import WORKER, Case, compare, small_case, write_cases
from paddlenlp_galvatron.proof.random_cases import random_cases

from . import plans

STEPS = 2


def disagreements(folder: Path, cases: list[Case], seed: int) -> list[str]:
    messages, results, world_size = folder / "messages", folder / "results", cases[0].plan.world_size
    messages.mkdir()
    results.mkdir()
    write_cases(results, cases)
    arguments = [str(messages), str(seed), WORKER, str(results)]
    worker = Path(__file__).with_name("deferred_worker.py")
    launch(str(worker), arguments, world_size, folder / "log", timeout_s=580)
    require_same_calls(messages, world_size)
    return [
        f"case {number}: loss {result.max_loss_diff:.1e}, gradient {result.max_grad_rel_diff:.1e} "
        f"{result.worst_gradient}"
        for number, result in enumerate(compare(results, cases))
        if not result.agrees
    ]


def named(cases: list[plans.Named]) -> list[Case]:
    return [small_case(c.plan, c.family, c.optimizer, STEPS, tied=c.tied, kv_heads=c.kv_heads) for c in cases]


# Pipelines, both vocabularies, Ulysses, strided groups, zero2, zero3, tied tables, reduction of every micro-batch.
SOME = [plans.FOUR[2], plans.FOUR[5], plans.FOUR[7], plans.ZERO[2], plans.ZERO[4], plans.ZERO[5], plans.ZERO[9]]
SOME += [plans.INTERLEAVED_FOUR[1], plans.INTERLEAVED_FOUR[5]]


def test_some_plans_train_as_one_process_does(tmp_path):
    assert not disagreements(tmp_path, named(SOME), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [*plans.TWO, *plans.INTERLEAVED_TWO],
        [*plans.FOUR, *plans.ZERO, *plans.INTERLEAVED_FOUR],
        plans.SIX,
        [*plans.EIGHT, *plans.INTERLEAVED_EIGHT],
    ],
    ids=["2 ranks", "4 ranks", "6 ranks", "8 ranks"],
)
def test_other_plans_train_as_one_process_does(tmp_path, cases):
    assert not disagreements(tmp_path, named(cases), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_random_plans_train_as_one_process_does(tmp_path, world_size):
    cases = random_cases(16, world_size, seed=3, steps=STEPS)
    cases += random_cases(4, world_size, seed=4, precision=Precision.BF16, steps=STEPS)
    assert not disagreements(tmp_path, cases, seed=2)
