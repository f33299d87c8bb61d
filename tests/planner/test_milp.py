"""The core's optimum of small pipelines is that of a mixed-integer linear program, which HiGHS solves.

How many layers of a stage take which strategy are whole numbers; the step is at least as long as each path through the
passes. Paths are added as they become longest (`longest_path`). Layouts change for nothing here: brute force in
test_pipeline.py has prices of change, on fewer layers.
"""

from __future__ import annotations

import math
from typing import Any

import galvatron_dp_core
import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import input_of, order, way_ms

from .test_pipeline import free, lists

EXACT = 1e-6  # relative: HiGHS's own tolerance


def problem(seed: int) -> dict[str, Any]:
    """Arguments of the core's Pipeline, and the schedule."""
    draw = np.random.default_rng(seed)
    stages, micro_batches = int(draw.integers(2, 5)), int(draw.integers(2, 7))
    strategies, vocabs = int(draw.integers(2, 5)), int(draw.integers(1, 3))
    schedule = Schedule.GPIPE if draw.random() < 0.4 else Schedule.ONE_F_ONE_B
    others = {"layers": np.array([int(draw.integers(stages, 7 * stages))]), **lists(schedule, stages, micro_batches)}
    numbers = draw.uniform((1, 2, 0, 5, *[0] * 5), (3, 9, 9, 60, 15, 60, 30, 30, 10), (strategies, 9))
    others |= {"vocabs": draw.uniform(0, (5, 9, 9, 100, 10, 60, 30, 30, 10), (vocabs, 2, 9))}
    others |= dict.fromkeys(("vocab_enter", "vocab_leave"), np.zeros((vocabs, 1, 2)))
    others |= {
        "middle": np.array([[0, 0, 0, *draw.uniform(0, 20, 6)]] * 2),
        "send": np.full((2, 1), draw.uniform(0, 2)),
    }
    others |= {"schedule": schedule, "budget_mib": draw.uniform(200, 600)}
    return free(numbers, [0] * strategies, [0], **others)


def longest_path(
    schedule: Schedule, times: np.ndarray, micro_batches: int, send: float
) -> tuple[float, np.ndarray, int]:
    """(ms, how often it counts each of a stage's times, messages) of the longest path through a step's passes."""
    stages = len(times)
    queues = [order(schedule, s, stages, micro_batches, 1) for s in range(stages)]
    done: dict[Any, tuple[float, Any]] = {}  # end of each pass, and the pass before it on the longest path to it
    place, last = [0] * stages, [None] * stages
    while any(place[s] < len(queues[s]) for s in range(stages)):
        for s, queue in enumerate(queues):
            while place[s] < len(queue):
                work = queue[place[s]]
                before = input_of(s, work, stages - 1)
                if before is not None and before not in done:
                    break
                way = way_ms(s, before, [send] * (stages - 1))
                ready = -math.inf if before is None else done[before][0] + way
                free = 0.0 if last[s] is None else done[last[s]][0]
                came = (last[s], 0) if free >= ready else (before, int(way > 0))
                now = (s, work.kind, work.micro_batch)
                done[now] = max(free, ready) + times[s][int(work.kind == "backward")], came
                last[s] = now
                place[s] += 1
    end = max(range(stages), key=lambda s: done[last[s]][0] + times[s][2])
    counts, messages, at = np.zeros((stages, 3)), 0, last[end]
    counts[end, 2] = 1
    while at is not None:
        counts[at[0], int(at[1] == "backward")] += 1
        at, passed = done[at][1]
        messages += passed
    return done[last[end]][0] + times[end][2], counts, messages


def by_milp(t: dict[str, Any]) -> float:
    """The least time of a step; infinite where nothing fits."""
    held, strategies, vocabs = t["in_flight"][:, 1], t["strategies"], t["vocabs"]
    stages, count, options, total = len(held), len(t["strategies"]), len(t["vocabs"]), int(t["layers"].sum())
    # Variables: the step's time; layers of each stage by strategy; whether a stage uses it; the vocabulary's strategy;
    # the terms of each stage's workspace.
    layers = 1 + np.arange(stages * count).reshape(stages, count)
    used = layers + stages * count
    vocab = 1 + 2 * stages * count + np.arange(options)
    workspace = vocab[-1] + 1 + np.arange(4 * stages).reshape(stages, 4)
    size = workspace[-1, -1] + 1
    rows: list[np.ndarray] = []
    limits: list[tuple[float, float]] = []

    def add(terms: dict[int, float], low: float, high: float) -> None:
        row = np.zeros(size)
        for at, factor in terms.items():
            row[at] += factor
        rows.append(row)
        limits.append((low, high))

    def beside(s: int) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Parts of a stage next to its layers: by the vocabulary's strategy, or always."""
        if 0 < s < stages - 1:
            return {}, t["middle"][0]
        return {int(vocab[v]): vocabs[v, int(s > 0)] for v in range(options)}, np.zeros(9)

    add({int(at): 1 for at in layers.flat}, total, total)
    add({int(at): 1 for at in vocab}, 1, 1)
    for s in range(stages):
        by_vocab, fixed = beside(s)
        add({int(at): 1 for at in layers[s]}, 1, total)
        memory = {int(layers[s, k]): strategies[k, 3] + held[s] * strategies[k, 4] for k in range(count)}
        memory |= {at: part[3] + held[s] * part[4] for at, part in by_vocab.items()}
        memory |= {int(at): 1.0 for at in workspace[s]}
        add(memory, -np.inf, t["budget_mib"] - fixed[3] - held[s] * fixed[4])
        for term, place in enumerate(workspace[s], 5):
            add({int(place): 1.0}, fixed[term], np.inf)
            for at, part in by_vocab.items():
                add({int(place): 1.0, at: -part[term]}, 0, np.inf)
            for k in range(count):
                add({int(place): 1.0, int(used[s, k]): -strategies[k, term]}, 0, np.inf)
        for k in range(count):
            add({int(layers[s, k]): 1, int(used[s, k]): -total}, -np.inf, 0)
    whole = np.ones(size)
    whole[[0, *workspace.flat]] = 0
    high = np.full(size, np.inf)
    high[used.flat], high[vocab] = 1, 1
    goal = np.zeros(size)
    goal[0] = 1
    send = float(t["send"][0, 0])
    path = np.zeros((stages, 3))
    path[0] = t["micro_batches"], t["micro_batches"], 1  # the first stage works all the time
    messages = 0
    while True:
        terms = {0: 1.0}
        constant = messages * send
        for s in range(stages):
            by_vocab, fixed = beside(s)
            constant += path[s] @ fixed[:3]
            terms |= {int(layers[s, k]): -float(path[s] @ strategies[k, :3]) for k in range(count)}
            for at, part in by_vocab.items():
                terms[at] = terms.get(at, 0.0) - float(path[s] @ part[:3])
        add(terms, constant, np.inf)
        matrix = LinearConstraint(csr_array(np.array(rows)), *np.array(limits).T)
        found = milp(goal, constraints=matrix, integrality=whole, bounds=(0, high), options={"mip_rel_gap": EXACT / 10})
        if found.x is None:
            return math.inf
        x = found.x.copy()
        x[1 : workspace[0, 0]] = np.round(x[1 : workspace[0, 0]])
        times = np.zeros((stages, 3))
        for s in range(stages):
            by_vocab, fixed = beside(s)
            times[s] = (
                x[layers[s]] @ strategies[:, :3] + fixed[:3] + sum(x[at] * part[:3] for at, part in by_vocab.items())
            )
        time, path, messages = longest_path(t["schedule"], times, t["micro_batches"], send)
        if time <= x[0] * (1 + EXACT):
            return time


def check(seed: int) -> bool:
    """Whether anything fits."""
    t = problem(seed)
    best = by_milp(t)
    core = galvatron_dp_core.Pipeline(**{name: value for name, value in t.items() if name != "schedule"})
    cost, proven, *_ = core.solve(math.inf, 10**9)
    assert cost == pytest.approx(best, rel=2 * EXACT) and (proven == cost or cost == math.inf), seed
    return cost < math.inf


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 270), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_equals_a_mixed_integer_program(seeds: range) -> None:
    fits = sum(map(check, seeds))
    assert 0.4 * len(seeds) < fits < len(seeds)
