"""The whole search finds what exhaustive enumeration finds, and its answers are consistent and monotone."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.search import SearchOptions, search

from .random_cost import RandomCost, best_by_enumeration, model_of


def problem(seed: int, **fixed: Any) -> tuple[ModelShape, RandomCost, SearchOptions]:
    """A small random search: cluster, space, batch and memory all drawn."""
    draw = random.Random(seed)
    layers = draw.choice((1, 2, 3, 3, 4))
    values: dict[str, Any] = {
        "num_gpus_per_node": draw.choice((1, 2, 3, 4, 6)),
        "memory_constraint": draw.uniform(0.2, 4),
        "settle_bsz": draw.choice((2, 4, 6, 12)),
        "seq_length": 12,
        "sequence_parallel": draw.random() < 0.5,
        "sp_space": draw.choice(("tp", "tp+sp", "sp")),
        "disable_ckpt": draw.random() < 0.6,
        "disable_sdp": draw.random() < 0.5,
        "disable_vtp": draw.random() < 0.5,
        "pipeline_type": draw.choice((None, "gpipe", "pipedream_flush")),
        "fine_grained_mode": draw.random() < 0.9,
        "default_dp_type": draw.choice(("ddp", "zero2")),
        "embed_sdp": draw.choice((None, True, False)),
        "context_mib": draw.choice((0.0, 100.0)),
    }
    if values["sp_space"] == "tp":
        values["tp_consec"] = draw.random() < 0.7
    if layers == 4:
        values |= {"disable_sdp": True, "disable_ckpt": True, "settle_chunk": draw.choice((1, 2))}
    options = SearchOptions.from_mapping(values | fixed)
    return model_of(layers), RandomCost(model_of(layers), options, seed), options


def check_against_enumeration(seed: int) -> bool:
    """Whether there was a plan."""
    model, cost, options = problem(seed)
    result, best = search(model, cost, options), best_by_enumeration(model, cost, options)
    if best == inf:
        assert result.best is None, seed
        assert result.need is None or result.need.memory_mib > options.memory_constraint * 1024
        return False
    assert result.best is not None, seed
    assert result.time_s / result.plan.global_batch == pytest.approx(best, rel=1e-9), seed
    assert result.gap <= 1e-9, seed
    assert find_faults(result.plan, model) == []
    assert max(stage.memory.total_mib for stage in result.best.prediction.stages) <= options.memory_constraint * 1024
    return True


def test_equals_exhaustive_enumeration() -> None:
    feasible = sum(check_against_enumeration(seed) for seed in range(60))
    assert 30 < feasible < 60


@pytest.mark.slow
def test_equals_exhaustive_enumeration_often() -> None:
    for seed in range(1000, 1600):
        check_against_enumeration(seed)
