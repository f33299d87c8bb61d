"""Stages of several chunks: whole searches against enumeration, and the bubble that is known."""

import math
import random
from itertools import product
from typing import Any

import galvatron_dp_core
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.schedule import arrays, chunks_in_flight
from paddlenlp_galvatron.planner import SearchOptions, engine, search
from paddlenlp_galvatron.planner.space import PlanFamily

from .random_cost import RandomCost, best_by_enumeration, model_of
from .test_pipeline import free


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_equal_chunks_have_the_bubble_that_is_known_or_less(chunks: int) -> None:
    """Layers that share out evenly, and nothing next to them: the bubble is (P - 1) / (m v)."""
    passes, runs = arrays(Schedule.ONE_F_ONE_B, 4, 16, chunks)
    held = [
        (stage, *moment)
        for stage in range(4)
        for moment in chunks_in_flight(Schedule.ONE_F_ONE_B, stage, 4, 16, chunks)
    ]
    sizes = {"layers": np.array([8 * chunks]), "micro_batches": 16, "passes": passes, "runs": runs}
    arguments = free(np.array([[1.0, 2, *[0] * 7]]), [0], [0], **sizes, in_flight=np.array(held), budget_mib=1.0)
    time_ms, proven_ms, *_ = galvatron_dp_core.Pipeline(**arguments).solve(math.inf, 10**7)
    work = 16 * 2 * chunks * 3
    assert work <= proven_ms <= time_ms <= work * (1 + 3 / (16 * chunks)) * (1 + 1e-9)


def problem(seed: int, chunks: int, gpus: int) -> tuple[list[Any], RandomCost, SearchOptions]:
    """A small random search over up to so many chunks of as many stages as GPUs."""
    draw = random.Random(seed)
    layers = 6 if chunks * gpus == 6 else draw.choice((4, 5))
    options = SearchOptions.from_mapping(
        {
            "gap": 0,
            "num_gpus_per_node": gpus,
            "memory_constraint": draw.uniform(0.5, 4),
            "settle_bsz": draw.choice((4, 6)) if gpus == 2 else draw.choice((6, 12)),
            "settle_chunk": 2,
            "seq_length": 12,
            "disable_sdp": True,
            "disable_ckpt": layers != 4 or draw.random() < 0.5,
            "disable_vtp": True,
            "max_virtual_pp_deg": chunks,
        }
    )
    models = [model_of(layers)]
    return models, RandomCost(models, options, seed), options


@pytest.mark.parametrize(("chunks", "gpus"), [(1, 2), (2, 2), (3, 2), (2, 3)])
def test_whole_searches_equal_exhaustive_enumeration(chunks: int, gpus: int) -> None:
    chosen = optimal = tried = 0
    for seed in range(25):
        models, cost, options = problem(seed, chunks, gpus)
        result, best = search(models, cost, options), best_by_enumeration(models, cost, options)
        assert (result.best is None) == (best == math.inf), seed
        if result.best is None:
            continue
        tried += 1
        batch = result.plan.global_batch
        assert result.lower_bound_s / batch <= best * (1 + 1e-9) <= result.time_s / batch * (1 + 2e-9), seed
        most = max(stage.memory.total_mib for stage in result.best.prediction.stages)
        assert most <= options.memory_constraint * 1024 and find_faults(result.plan, models[0]) == []
        chosen += result.plan.chunks > 1
        optimal += result.time_s / batch <= best * (1 + 1e-9)
    assert tried > 15 and optimal > (0.7 if chunks > 1 else 0.99) * tried
    assert chunks == 1 or chosen > 0


def test_a_short_search_bounds_the_families_that_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for trials, seed in product((0, 1), range(25)):
        monkeypatch.setattr(engine, "MOST_TRIALS", trials)
        models, cost, options = problem(seed, 2, 2)
        whole = search(models, cost, options)
        short = search(models, cost, options.model_copy(update={"device": "h100-80gb", "max_virtual_pp_deg": None}))
        if whole.fastest and PlanFamily.of(whole.fastest.plan) in short.outcomes:
            assert min(short.lower_bound_s, short.left_out_s) <= whole.time_s * (1 + 1e-9)
            assert short.lower_bound_s <= short.time_s and bool(short.left_out) == (short.left_out_s < short.time_s)


@given(seed=st.integers(0, 2**32), chunks=st.integers(2, 4), layers=st.integers(4, 10), gpus=st.sampled_from((2, 4)))
def test_more_chunks_are_never_slower(seed: int, chunks: int, layers: int, gpus: int) -> None:
    models = [model_of(layers)]
    speeds = []
    for most in (1, chunks):
        options = SearchOptions.from_mapping(
            {
                "gap": 0,
                "num_gpus_per_node": gpus,
                "memory_constraint": random.Random(seed).uniform(0.5, 6),
                "settle_bsz": 8,
                "seq_length": 12,
                "max_virtual_pp_deg": most,
            }
        )
        result = search(models, RandomCost(models, options, seed), options)
        speeds.append(result.best.samples_per_s if result.best else 0.0)
    assert speeds[1] >= speeds[0] * (1 - 1e-9)
