"""Plans drawn at random from the whole space train as one process does: some in bf16, and a sweep of 144."""

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from random_cases import random_cases

from paddlenlp_galvatron.plan import Precision

from .test_parity import disagreements


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "more, four steps"])
def test_a_sample_in_bf16_trains_within_its_rounding(whole):
    cases = random_cases(6 if whole else 4, 4, seed=2, precision=Precision.BF16)
    if not whole:
        cases = [replace(case, steps=3) for case in cases]
    assert not disagreements(cases)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_the_sweep_trains_as_one_process_does(world_size):
    assert not disagreements(random_cases(8, world_size, seed=1) + random_cases(40, world_size, seed=0))
