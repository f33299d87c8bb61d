"""The core's pipelines equal brute force on random tables: more stages and micro-batches than whole searches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import galvatron_dp_core
import numpy as np
import pytest

from paddlenlp_galvatron.cost_model import StageTimes, step_ms
from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import in_flight

from .random_cost import divisions

Numbers = Sequence[float]


def tables(seed: int) -> dict[str, Any]:
    """Arguments of the core's Pipeline, drawn at random; prices of change are distances, so they are a metric."""
    draw = random.Random(seed)
    stages = draw.choice((1, 2, 2, 3, 3, 4, 5))
    layers = stages + draw.randint(0, 2 if stages > 3 else 3)
    micro_batches = draw.choice((1, 2, 3, 5, 8, 20, 100))
    strategies, groups, vocabs = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2)
    gpipe = draw.random() < 0.4
    ties = draw.random() < 0.3
    place = [draw.uniform(0, 1) for _ in range(groups + 2 + 2 * vocabs)]

    def part() -> list[float]:
        scale = draw.choice((1, 1, 5))
        times = [draw.uniform(1, 3), draw.uniform(2, 6) * scale, draw.uniform(0, 20)]
        return [float(round(t)) for t in times] if ties else times

    def distance(a: int, b: int) -> list[float]:
        forward = abs(place[a] - place[b])
        return [forward, 2 * forward]

    def part_with_memory() -> list[float]:
        return [*part(), draw.uniform(0, 50), draw.uniform(0, 20), draw.choice((0.0, 0.0, draw.uniform(0, 60)))]

    edge, first_vocab = groups, groups + 2
    return {
        "layers": layers,
        "micro_batches": micro_batches,
        "gpipe": gpipe,
        "strategies": np.array([part_with_memory() for _ in range(strategies)]),
        "groups": np.array([draw.randrange(groups) for _ in range(strategies)]),
        "change": np.array([[distance(a, b) for b in range(groups)] for a in range(groups)]),
        "enter": np.array([distance(edge, g) for g in range(groups)]),
        "leave": np.array([distance(g, edge) for g in range(groups)]),
        "vocabs": np.array([[part_with_memory(), part_with_memory()] for _ in range(vocabs)]),
        "vocab_enter": np.array([[distance(first_vocab + v, g) for g in range(groups)] for v in range(vocabs)]),
        "vocab_leave": np.array([[distance(g, first_vocab + v) for g in range(groups)] for v in range(vocabs)]),
        "in_flight": np.array(
            [
                in_flight(Schedule.GPIPE if gpipe else Schedule.ONE_F_ONE_B, s, stages, micro_batches)
                for s in range(stages)
            ]
        ),
        "send": np.full(stages - 1, draw.uniform(0, 1)),
        "budget_mib": draw.uniform(50, 500),
    }


def stage(t: dict[str, Any], vocab: int, s: int, choice: Sequence[int]) -> tuple[Numbers, float]:
    """Times (forward, backward, sync) and memory of stage s with these layers."""
    stages, last = len(t["in_flight"]), s == len(t["in_flight"]) - 1
    parts = [t["strategies"][k] for k in choice]
    if s == 0:
        parts.append(t["vocabs"][vocab][0])
    if last and stages > 1:
        parts.append(t["vocabs"][vocab][1])
    groups = [t["groups"][k] for k in choice]
    passes = [t["vocab_enter"][vocab][groups[0]] if s == 0 else t["enter"][groups[0]]]
    passes += [t["change"][a][b] for a, b in pairwise(groups)]
    passes += [t["vocab_leave"][vocab][groups[-1]] if last else t["leave"][groups[-1]]]
    times = np.sum(parts, axis=0)[:3] + np.append(np.sum(passes, axis=0), 0)
    memory = sum(p[3] + t["in_flight"][s] * p[4] for p in parts) + max(p[5] for p in parts)
    return times.tolist(), memory


def step(t: dict[str, Any], times: Sequence[Numbers]) -> float:
    forward, backward, sync = zip(*times, strict=True)
    schedule = Schedule.GPIPE if t["gpipe"] else Schedule.ONE_F_ONE_B
    return step_ms(schedule, StageTimes(forward, backward, sync, t["send"].tolist()), t["micro_batches"])


def brute_force(t: dict[str, Any]) -> float:
    stages, best = len(t["in_flight"]), math.inf
    for vocab, division in product(range(len(t["vocabs"])), divisions(t["layers"], stages)):
        fitting = [
            {
                tuple(times)
                for choice in product(range(len(t["strategies"])), repeat=layers)
                for times, memory in [stage(t, vocab, s, choice)]
                if memory <= t["budget_mib"]
            }
            for s, layers in enumerate(division)
        ]
        for times in product(*map(_unbeaten, fitting)):
            best = min(best, step(t, times))
    return best


def _unbeaten(points: set[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return [p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)]


def check(seed: int) -> bool:
    """Whether anything fits."""
    t = tables(seed)
    best, core = brute_force(t), galvatron_dp_core.Pipeline(**t)
    bound = core.bound()
    cost, proven, vocab, division, choice = core.solve(math.inf, 10**9)
    if best == math.inf:
        assert cost == math.inf and vocab == -1, seed
        assert core.least_memory()[0] > t["budget_mib"], seed
        return False
    assert cost == pytest.approx(best, rel=1e-9) and proven == cost, seed
    assert bound <= cost * (1 + 1e-12) and core.least_memory()[0] <= t["budget_mib"] * (1 + 1e-12), seed
    first = np.cumsum([0, *division])
    taken = [stage(t, vocab, s, choice[first[s] : first[s + 1]]) for s in range(len(division))]
    assert step(t, [times for times, _ in taken]) == pytest.approx(cost, rel=1e-9), seed
    assert max(memory for _, memory in taken) <= t["budget_mib"] * (1 + 1e-11), seed
    assert core.solve(cost, 10**9)[0] == math.inf, "nothing is below the optimum"
    return True


def test_equals_brute_force() -> None:
    assert 150 < sum(check(seed) for seed in range(300)) < 300


@pytest.mark.slow
def test_equals_brute_force_often() -> None:
    for seed in range(1000, 6000):
        check(seed)
