"""Plans drawn at random from the whole space train as one process does: some in bf16, and a sweep of 144."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from random_cases import random_cases

from paddlenlp_galvatron.model.layer import PARTLY
from paddlenlp_galvatron.plan import Precision, Recompute

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


def test_random_plans_reach_the_whole_space():
    cases = random_cases(40, 4, seed=0) + random_cases(40, 6, seed=0) + random_cases(40, 8, seed=0)
    layers = [layer for case in cases for layer in case.plan.layers]
    assert {layer.degree for layer in layers} == {1, 2, 3, 4, 6, 8}
    assert {(layer.ulysses, layer.consecutive, layer.dp_type) for layer in layers if layer.degree == 2} >= {
        (ulysses, consecutive, dp_type)
        for ulysses, consecutive in [(False, True), (False, False), (True, True)]
        for dp_type in ("ddp", "zero2", "zero3")
    }
    assert {layer.context for layer in layers} >= {1, 2, 3, 4, 6}
    assert {layer.recompute for layer in layers} == {Recompute.NONE, Recompute.FULL, *PARTLY}
    assert {(case.plan.pipeline, case.plan.chunks) for case in cases} >= {
        *((stages, 1) for stages in (1, 2, 3, 4)),
        *((2, chunks) for chunks in (2, 3)),
    }
    assert any(layer.degree > case.shape.kv_heads for case in cases for layer in case.plan.layers)
    assert {(case.shape.family, case.shape.tied_embeddings, case.optimizer) for case in cases} == {
        (family, tied, optimizer)
        for family in ("llama", "qwen2", "qwen3", "ernie4_5")
        for tied in (False, True)
        for optimizer in ("sgd", "adamw")
    }
