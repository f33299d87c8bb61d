"""Stages of several chunks: the core against brute force on random tables, and whole searches against enumeration.

Steps are timed by the core's simulation, which tests/cost_model/test_simulate.py holds to the definition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

import galvatron_dp_core
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.schedule import arrays, chunks_in_flight
from paddlenlp_galvatron.planner import SearchOptions, search

from .random_cost import RandomCost, best_by_enumeration, divisions, model_of

Times = tuple[float, ...]  # of a stage: forward of each chunk, backward of each, sync


def tables(seed: int, **size: int) -> dict[str, Any]:
    """Arguments of the core's Pipeline, drawn at random; prices of change are distances, so they are a metric."""
    draw = random.Random(seed)
    stages, chunks = size.get("stages") or draw.choice((2, 2, 3)), size.get("chunks") or draw.choice((2, 2, 3))
    layers = size.get("layers") or stages * chunks + draw.choice((0, 1, 1, 2) if stages + chunks < 6 else (0, 1))
    micro_batches = size.get("micro_batches") or draw.choice((1, 2, 3, 4, 5, 6, 8, 20))
    layouts = draw.randint(1, 2)
    layout_of = [*range(layouts), *([draw.randrange(layouts)] if draw.random() < 0.3 else [])]
    vocabs = draw.randint(1, 2)
    place = [draw.uniform(0, 1) for _ in range(layouts + 1 + vocabs)]

    def distance(a: int, b: int) -> list[float]:
        return [abs(place[a] - place[b]), 2 * abs(place[a] - place[b])]

    def part(times: bool = True) -> list[float]:
        memory = [draw.uniform(0, 50), draw.uniform(0, 20)]
        memory += [draw.choice((0.0, draw.uniform(0, most))) for most in (60, 30, 30, 10)]
        return [*((draw.uniform(1, 3), draw.uniform(2, 6), draw.uniform(0, 9)) if times else (0.0,) * 3), *memory]

    def to(where: int) -> list[list[float]]:
        return [distance(where, layout) for layout in range(layouts)]

    moments = [
        (stage, *moment)
        for stage in range(stages)
        for moment in chunks_in_flight(Schedule.ONE_F_ONE_B, stage, stages, micro_batches, chunks)
    ]
    passes, runs = arrays(Schedule.ONE_F_ONE_B, stages, micro_batches, chunks)
    return {
        "layers": np.array([layers]),
        "micro_batches": micro_batches,
        "passes": passes,
        "runs": runs,
        "strategies": np.array([part() for _ in layout_of]),
        "layouts": np.array(layout_of),
        "types": np.zeros(layouts, dtype=int),
        "change": np.array([to(layout) for layout in range(layouts)]),
        "enter": np.array([to(layouts)] * 2),
        "leave": np.array([to(layouts)] * 2),
        "vocabs": np.array([[part(), part()] for _ in range(vocabs)]),
        "vocab_enter": np.array([to(layouts + 1 + v) for v in range(vocabs)]),
        "vocab_leave": np.array([to(layouts + 1 + v) for v in range(vocabs)]),
        "middle": np.array([part(times=False), part(times=False)]),
        "in_flight": np.array(moments),
        "send": np.full((2, 1), draw.choice((0.0, 0.2, 1.0)) * draw.random()),
        "budget_mib": draw.uniform(100, 1500),
    }


def stage_points(t: dict[str, Any], vocab: int, stage: int, layers: Sequence[int]) -> Iterator[Times]:
    """Times of every choice of strategies that fits, where the stage's chunks have so many layers."""
    moments = [row[1:] for row in t["in_flight"] if row[0] == stage]
    stages, chunks = t["in_flight"][-1, 0] + 1, len(layers)
    for choice in product(range(len(t["strategies"])), repeat=sum(layers)):
        ends = [0, *accumulate(layers)]
        forward, backward, sync, states, workspace, activations = [], [], 0.0, 0.0, np.zeros(4), []
        for chunk, (first, stop) in enumerate(pairwise(ends)):
            is_first, is_last = stage == chunk == 0, (stage, chunk) == (stages - 1, chunks - 1)
            later = chunk > 0 or stage in (0, stages - 1)
            beside = t["vocabs"][vocab][int(is_last)] if is_first or is_last else t["middle"][int(later)]
            parts = np.array([beside, *(t["strategies"][k] for k in choice[first:stop])])
            layouts = [t["layouts"][k] for k in choice[first:stop]]
            boundaries = [t["vocab_enter"][vocab][layouts[0]] if is_first else t["enter"][0][layouts[0]]]
            boundaries += [t["change"][a][b] for a, b in pairwise(layouts)]
            boundaries += [t["vocab_leave"][vocab][layouts[-1]] if is_last else t["leave"][0][layouts[-1]]]
            moved = np.sum(boundaries, axis=0)
            sums = parts.sum(axis=0)
            forward.append(sums[0] + moved[0])
            backward.append(sums[1] + moved[1])
            sync += sums[2]
            states += sums[3]
            activations.append(sums[4])
            workspace = np.maximum(workspace, parts[:, 5:].max(axis=0))
        if max(states + workspace.sum() + np.dot(moment, activations) for moment in moments) <= t["budget_mib"]:
            yield (*forward, *backward, sync)


def brute_force(t: dict[str, Any]) -> float:
    stages, chunks = int(t["in_flight"][-1, 0]) + 1, t["in_flight"].shape[1] - 1
    best = math.inf
    send = np.full(stages * chunks - 1, t["send"][0, 0])
    known: dict[Any, list[Times]] = {}
    for vocab, division in product(range(len(t["vocabs"])), divisions(int(t["layers"][0]), stages * chunks)):
        points = []
        for stage in range(stages):
            key = vocab, stage, division[stage::stages]
            if key not in known:
                known[key] = _unbeaten(set(stage_points(t, *key)))
            points.append(known[key])
        for chosen in product(*points):
            forward = [point[chunk] for chunk in range(chunks) for point in chosen]
            backward = [point[chunks + chunk] for chunk in range(chunks) for point in chosen]
            sync = [point[-1] for point in chosen]
            times = forward, backward, sync, send
            best = min(best, galvatron_dp_core.step_ms(t["passes"], t["runs"], t["micro_batches"], *times))
    return best


def _unbeaten(points: set[Times]) -> list[Times]:
    return [p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)]


def check(seed: int) -> tuple[float, float]:
    """How far the plan lies above the optimum, and its certificate below it; NaN where nothing fits."""
    t = tables(seed)
    best, core = brute_force(t), galvatron_dp_core.Pipeline(**t)
    bound, tight = core.bound(), core.tight_bound(math.inf)
    time_ms, proven_ms, vocab, division, choice = core.solve(math.inf, 10**7)
    if best == math.inf:
        assert time_ms == math.inf and vocab == -1, seed
        return math.nan, math.nan
    for lower in (bound, tight, proven_ms):
        assert lower <= best * (1 + 1e-9), seed
    assert time_ms >= best * (1 - 1e-9), seed
    assert sum(division) == len(choice) == t["layers"][0], seed
    stages = int(t["in_flight"][-1, 0]) + 1
    ends = [0, *accumulate(division)]
    pieces = [choice[first:stop] for first, stop in pairwise(ends)]
    assert all(pieces) and len(pieces) == stages * (t["in_flight"].shape[1] - 1)
    return time_ms / best - 1, 1 - proven_ms / best


@pytest.mark.parametrize("seeds", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_bounds_hold_and_most_plans_are_the_best(seeds: int) -> None:
    """A stage of two or three layers whose strategies all differ is the hardest: larger ones leave less."""
    results = np.array([check(seed) for seed in range(seeds)])
    above, below = results[~np.isnan(results[:, 0])].T
    assert seeds / 2 < len(above) < seeds
    assert (above < 1e-9).mean() > 0.65 and np.median(below) < 0.02


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_equal_chunks_have_the_bubble_that_is_known_or_less(chunks: int) -> None:
    """Layers that share out evenly, and nothing next to them: the bubble is (P - 1) / (m v)."""
    t = tables(0, stages=4, chunks=chunks, layers=8 * chunks, micro_batches=16)
    alike = {"strategies": np.array([[1.0, 2, *[0] * 7]]), "layouts": np.array([0]), "types": np.array([0])}
    free = np.zeros((2, 1, 2))
    boundaries = {"change": free[:1], "enter": free, "leave": free, "vocab_enter": free[:1], "vocab_leave": free[:1]}
    beside = {"vocabs": np.zeros((1, 2, 9)), "middle": np.zeros((2, 9)), "send": np.zeros((2, 1)), "budget_mib": 1.0}
    time_ms, proven_ms, *_ = galvatron_dp_core.Pipeline(**t | alike | boundaries | beside).solve(math.inf, 10**7)
    work = 16 * 2 * chunks * 3
    assert work <= proven_ms <= time_ms <= work * (1 + 3 / (16 * chunks)) * (1 + 1e-9)


def problem(seed: int, chunks: int) -> tuple[list[Any], RandomCost, SearchOptions]:
    """A small random search over up to so many chunks of two stages."""
    draw = random.Random(seed)
    layers = 6 if chunks == 3 else draw.choice((4, 5))
    options = SearchOptions.from_mapping(
        {
            "gap": 0,
            "num_gpus_per_node": 2,
            "memory_constraint": draw.uniform(0.5, 4),
            "settle_bsz": draw.choice((4, 6)),
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


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_whole_searches_equal_exhaustive_enumeration(chunks: int) -> None:
    chosen = optimal = tried = 0
    for seed in range(25):
        models, cost, options = problem(seed, chunks)
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
