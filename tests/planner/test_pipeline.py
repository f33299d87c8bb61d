"""The core's pipelines equal brute force on random tables: more stages and micro-batches than whole searches.

Steps are timed by the core's simulation, which tests/cost_model/test_simulate.py holds to the definition.
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import galvatron_dp_core
import numpy as np
import pytest

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import arrays, chunks_in_flight

from .random_cost import divisions

Numbers = Sequence[float]


def tables(seed: int) -> dict[str, Any]:
    """Arguments of the core's Pipeline, drawn at random; prices of change are distances, so they are a metric."""
    draw = random.Random(seed)
    types = draw.choice((1, 1, 2, 3))
    stages = draw.choice((1, 2, 2, 3, 3, 4, 5))
    count = max(stages, types) + draw.randint(0, 2 if stages > 3 else 3)
    layers = np.diff([0, *sorted(draw.sample(range(1, count), types - 1)), count])
    micro_batches = draw.choice((1, 2, 3, 5, 8, 20, 100))
    vocabs, layouts = (
        draw.randint(1, 2),
        [kind for kind in range(types) for _ in range(draw.randint(1, 3 if types == 1 else 2))],
    )
    schedule = Schedule.GPIPE if draw.random() < 0.4 else Schedule.ONE_F_ONE_B
    ties = draw.random() < 0.3
    place = [draw.uniform(0, 1) for _ in range(len(layouts) + 2 + 2 * vocabs)]
    width = [draw.choice((0.3, 1, 2)) for _ in range(types)]  # of tokens passed between layers of a type
    begins = [width[0], *map(min, pairwise(width))]  # and in front of its first layer
    ends = [*begins[1:], width[-1]]

    def part() -> list[float]:
        scale = draw.choice((1, 1, 5))
        times = [draw.uniform(1, 3), draw.uniform(2, 6) * scale, draw.uniform(0, 20)]
        return [float(round(t)) for t in times] if ties else times

    def distance(a: int, b: int, width: float) -> list[float]:
        forward = abs(place[a] - place[b]) * width
        return [forward, 2 * forward]

    def change(a: int, b: int) -> list[float]:
        before, after = layouts[a], layouts[b]
        return distance(a, b, (width if before == after else begins)[after] if before in (after, after - 1) else 0)

    def workspace() -> list[float]:
        return [draw.choice((0.0, 0.0, draw.uniform(0, most))) for most in (60, 30, 30, 10)]

    def part_with_memory() -> list[float]:
        return [*part(), draw.uniform(0, 50), draw.uniform(0, 20), *workspace()]

    edge, first_vocab, all_layouts = len(layouts), len(layouts) + 2, range(len(layouts))
    layout_of = [
        g
        for kind in range(types)
        for g in draw.choices([g for g in all_layouts if layouts[g] == kind], k=draw.randint(1, 3 if types == 1 else 2))
    ]
    send = draw.uniform(0, 1)
    return {
        "layers": layers,
        **lists(schedule, stages, micro_batches),
        "strategies": np.array([part_with_memory() for _ in layout_of]),
        "layouts": np.array(layout_of),
        "types": np.array(layouts),
        "change": np.array([[change(a, b) for b in all_layouts] for a in all_layouts]),
        "enter": np.array([[distance(edge, g, at[layouts[g]]) for g in all_layouts] for at in (width, begins)]),
        "leave": np.array([[distance(g, edge, at[layouts[g]]) for g in all_layouts] for at in (width, ends)]),
        "vocabs": np.array([[part_with_memory(), part_with_memory()] for _ in range(vocabs)]),
        "vocab_enter": np.array([[distance(first_vocab + v, g, width[0]) for g in all_layouts] for v in range(vocabs)]),
        "vocab_leave": np.array(
            [[distance(g, first_vocab + v, width[-1]) for g in all_layouts] for v in range(vocabs)]
        ),
        "middle": np.array([[0, 0, 0, draw.uniform(0, 20), draw.uniform(0, 20), *workspace()]] * 2),
        "send": send * np.array([width, begins]),
        "budget_mib": draw.uniform(50, 500),
    }


def lists(schedule: Schedule, stages: int, micro_batches: int) -> dict[str, Any]:
    """The core's input from a schedule."""
    passes, runs = arrays(schedule, stages, micro_batches)
    held = np.array([(stage, *chunks_in_flight(schedule, stage, stages, micro_batches)[0]) for stage in range(stages)])
    return {"micro_batches": micro_batches, "passes": passes, "runs": runs, "in_flight": held}


def free(strategies: np.ndarray, layouts: Sequence[int], types: Sequence[int], **others: Any) -> dict[str, Any]:
    """Arguments of the core's Pipeline, in which nothing but layers costs anything unless `others` say so."""
    count = max(types) + 1
    boundary, vocab = np.zeros((2, len(types), 2)), np.zeros((1, len(types), 2))
    unpriced = {"change": np.zeros((len(types), len(types), 2)), "enter": boundary, "leave": boundary}
    unpriced |= {"vocabs": np.zeros((1, 2, 9)), "vocab_enter": vocab, "vocab_leave": vocab}
    unpriced |= {"middle": np.zeros((2, 9)), "send": np.zeros((2, count))}
    return unpriced | {"strategies": strategies, "layouts": np.array(layouts), "types": np.array(types)} | others


def kinds_of(t: dict[str, Any]) -> list[int]:
    """Type of each layer."""
    return [kind for kind, count in enumerate(t["layers"]) for _ in range(count)]


def stage(t: dict[str, Any], vocab: int, s: int, first: int, choice: Sequence[int]) -> tuple[Numbers, float]:
    """Times (forward, backward, sync) and memory of stage s with these layers, from a first one on."""
    kinds, stop = kinds_of(t), first + len(choice)
    parts = [t["strategies"][k] for k in choice]
    if s == 0:
        parts.append(t["vocabs"][vocab][0])
    if stop == len(kinds) and s > 0:
        parts.append(t["vocabs"][vocab][1])
    elif s > 0:
        parts.append(t["middle"][0])
    layouts = [t["layouts"][k] for k in choice]
    begins, ends = (0 < at < len(kinds) and kinds[at - 1] != kinds[at] for at in (first, stop))
    passes = [t["vocab_enter"][vocab][layouts[0]] if s == 0 else t["enter"][int(begins)][layouts[0]]]
    passes += [t["change"][a][b] for a, b in pairwise(layouts)]
    passes += [t["vocab_leave"][vocab][layouts[-1]] if stop == len(kinds) else t["leave"][int(ends)][layouts[-1]]]
    times = np.sum(parts, axis=0)[:3] + np.append(np.sum(passes, axis=0), 0)
    memory = sum(p[3] + t["in_flight"][s, 1] * p[4] for p in parts) + np.max(parts, axis=0)[5:].sum()
    return times.tolist(), memory


def step(t: dict[str, Any], division: Sequence[int], times: Sequence[Numbers]) -> float:
    *passes_ms, sync = zip(*times, strict=True)
    kinds = kinds_of(t)
    boundaries = np.cumsum(division)[:-1]
    send = [t["send"][int(kinds[at - 1] != kinds[at])][kinds[at]] for at in boundaries]
    return galvatron_dp_core.step_ms(
        t["passes"], t["runs"], t["micro_batches"], passes_ms, sync, np.array(send, dtype=float)
    )


def brute_force(t: dict[str, Any]) -> float:
    stages, kinds, best = len(t["in_flight"]), kinds_of(t), math.inf
    of_kind = [[k for k, g in enumerate(t["layouts"]) if t["types"][g] == kind] for kind in range(len(t["layers"]))]
    for vocab, division in product(range(len(t["vocabs"])), divisions(len(kinds), stages)):
        firsts = np.cumsum([0, *division])
        fitting = [
            {
                tuple(times)
                for choice in product(*(of_kind[kind] for kind in kinds[first:stop]))
                for times, memory in [stage(t, vocab, s, first, choice)]
                if memory <= t["budget_mib"]
            }
            for s, (first, stop) in enumerate(pairwise(firsts))
        ]
        for times in product(*map(_unbeaten, fitting)):
            best = min(best, step(t, division, times))
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
    taken = [stage(t, vocab, s, first[s], choice[first[s] : first[s + 1]]) for s in range(len(division))]
    assert step(t, division, [times for times, _ in taken]) == pytest.approx(cost, rel=1e-9), seed
    assert max(memory for _, memory in taken) <= t["budget_mib"] * (1 + 1e-11), seed
    assert core.solve(cost, 10**9)[0] == math.inf, "nothing is below the optimum"
    return True


def test_equals_brute_force() -> None:
    assert 150 < sum(check(seed) for seed in range(300)) < 300


@pytest.mark.slow
def test_equals_brute_force_often() -> None:
    for seed in range(1000, 6000):
        check(seed)
