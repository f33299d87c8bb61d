"""The stage solver equals brute force, on every kind of table; bad input is a ValueError."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_galvatron.planner.solver import Solution, solve
from planner.reference import best_by_enumeration, best_by_labels

KINDS = ("alike", "alike, grouped", "alike, any switch", "free", "switch", "switch by layer")


def instance(seed: int, kind: str, most_layers: int = 5, most_strategies: int = 4) -> tuple[Any, Any, Any, float]:
    """Random tables; whole-number memory, so that no sum is rounded."""
    random = np.random.default_rng(seed)
    layers, strategies = random.integers(1, most_layers + 1), random.integers(1, most_strategies + 1)
    memory = random.integers(0, 12, (layers, strategies)).astype(float)
    time = random.integers(0, 10, (layers, strategies)) + random.integers(0, 2) * random.random((layers, strategies))
    if kind.startswith("alike"):
        memory[:], time[:] = memory[0], time[0]
    switch: Any = np.zeros((strategies, strategies))
    if kind == "alike, grouped":
        position = random.integers(0, 3, strategies) * random.random()
        switch = np.abs(position[:, None] - position[None])
    elif kind in ("switch", "alike, any switch"):
        switch = random.random((strategies, strategies)) * 3
    elif kind == "switch by layer":
        switch = random.random((layers, strategies, strategies)) * 3
    return memory, time, switch, float(random.integers(0, 12 * layers + 1))


def by_layer(switch: Any, layers: int) -> list[list[list[float]]]:
    return (switch if switch.ndim == 3 else np.broadcast_to(switch, (layers, *switch.shape))).tolist()


def check_consistent(solution: Solution, memory: Any, time: Any, switch: Any, budget: float) -> None:
    """The choice costs what the solution says, and fits."""
    layers = len(memory)
    if not solution.choice:
        assert solution.time_s == math.inf and solution.memory_mib > budget
        return
    assert len(solution.choice) == layers
    used = sum(memory[layer][k] for layer, k in enumerate(solution.choice))
    spent = sum(time[layer][k] for layer, k in enumerate(solution.choice))
    steps = by_layer(switch, layers)
    spent += sum(steps[layer][solution.choice[layer - 1]][solution.choice[layer]] for layer in range(1, layers))
    assert solution.memory_mib == pytest.approx(used, rel=1e-12) and used <= budget * (1 + 1e-11)
    assert solution.time_s == pytest.approx(spent, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_brute_force_on_small_tables(kind: str) -> None:
    for seed in range(400):
        memory, time, switch, budget = instance(seed, kind)
        solution = solve(memory, time, switch, budget)
        best = best_by_enumeration(memory.tolist(), time.tolist(), by_layer(switch, len(memory)), budget)
        assert solution.time_s == best or abs(solution.time_s - best) < 1e-9, (kind, seed)
        assert solution.lower_bound_s == pytest.approx(solution.time_s, abs=1e-9), (kind, seed)
        check_consistent(solution, memory, time, switch, budget)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_labels_on_larger_tables(kind: str) -> None:
    for seed in range(30):
        memory, time, switch, budget = instance(seed, kind, most_layers=16, most_strategies=9)
        best = best_by_labels(memory.tolist(), time.tolist(), by_layer(switch, len(memory)), budget)
        solution = solve(memory, time, switch, budget)
        assert solution.time_s == best or abs(solution.time_s - best) < 1e-9, (kind, seed)
        check_consistent(solution, memory, time, switch, budget)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS), gap=st.sampled_from([1e-4, 0.05, 0.5]))
def test_a_gap_is_certified(seed: int, kind: str, gap: float) -> None:
    memory, time, switch, budget = instance(seed, kind, most_layers=10, most_strategies=6)
    exact, rough = solve(memory, time, switch, budget), solve(memory, time, switch, budget, gap=gap)
    if exact.time_s == math.inf:
        assert rough.time_s == math.inf
        return
    assert rough.lower_bound_s <= exact.time_s + 1e-9
    assert exact.time_s - 1e-9 <= rough.time_s <= rough.lower_bound_s / (1 - gap) + 1e-9
    check_consistent(rough, memory, time, switch, budget)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS), more=st.just(0.0) | st.floats(1e-9, 20))
def test_more_memory_is_never_slower(seed: int, kind: str, more: float) -> None:
    memory, time, switch, budget = instance(seed, kind, most_layers=12, most_strategies=8)
    assert solve(memory, time, switch, budget + more).time_s <= solve(memory, time, switch, budget).time_s + 1e-9


@pytest.mark.slow
def test_what_is_too_hard_ends_before_memory_does() -> None:
    """A subset-sum problem."""
    memory = np.random.default_rng(0).random((40, 30))
    endless = memory, 1 - memory, np.zeros((30, 30)), 20.0
    with pytest.raises(MemoryError, match="allow a gap"):
        solve(*endless)
    rough = solve(*endless, gap=1e-3)
    assert rough.time_s <= rough.lower_bound_s / (1 - 1e-3)


def test_infinite_entries_forbid_a_choice() -> None:
    inf = math.inf
    assert solve([[1.0, inf]], [[5.0, 1.0]], np.zeros((2, 2)), 10).choice == (0,)
    assert solve([[1.0, 1.0]], [[5.0, inf]], np.zeros((2, 2)), inf).choice == (0,)
    assert solve([[1.0, 1.0]] * 2, [[5.0, 1.0], [1.0, 5.0]], [[0, inf], [inf, 0]], 10).time_s == 6
    assert solve([[inf]], [[1.0]], [[0.0]], 10).time_s == inf
    assert solve([[1.0], [1.0]], [[1.0], [1.0]], [[inf]], 10).time_s == inf


def test_where_nothing_fits_the_least_memory_is_told() -> None:
    solution = solve([[4.0, 3.0], [4.0, 2.5]], [[1.0, 2.0]] * 2, np.ones((2, 2)), 5)
    assert solution == Solution(math.inf, (), 5.5, math.inf)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], [], 1), "memory_mib: has shape"),
        (([[]], [[]], [[]], 1), "memory_mib: has shape"),
        (([[1.0, 2.0]], [[1.0]], [[0.0]], 1), "time_s: has shape"),
        (([[1.0]], [[1.0]], [[0.0, 0.0]], 1), "switch_s: has shape"),
        (([[1.0]], [[1.0]], [0.0], 1), "switch_s: has shape"),
        (([[1.0]] * 2, [[1.0]] * 2, [[[0.0]]], 1), "switch_s: has shape"),
        (([[math.nan]], [[1.0]], [[0.0]], 1), "memory_mib: nan is"),
        (([[1.0]], [[-1.0]], [[0.0]], 1), "time_s: -1 is"),
        (([[1.0]], [[1.0]], [[-1.0]], 1), "switch_s: -1 is"),
        (([[1e300]], [[1.0]], [[0.0]], 1), "memory_mib: 1e\\+300 is"),
        (([[1e-300, 0]], [[1, 1e135]], [[1, 0], [0, 1]], 5e-324), "memory_mib: 1e-300 is"),
        (([[1.0]], [[1.0]], [[0.0]], 5e-324), "budget_mib: 4.94066e-324 is"),
        ((np.zeros((10_000, 1000)), np.zeros((10_000, 1000)), [[0.0]], 1), "at most 100000 layers, 2000 strategies"),
        (([[1.0]], [[1.0]], [[0.0]], math.nan), "budget_mib: nan is"),
        (([[1.0]], [[1.0]], [[0.0]], -1), "budget_mib: -1 is"),
        (([[1.0]], [[1.0]], [[0.0]], 1, math.nan), "gap: nan is"),
        (([[1.0]], [[1.0]], [[0.0]], 1, 1.0), "gap: is not below 1"),
        (([["a"]], [[1.0]], [[0.0]], 1), "memory_mib: is no table"),
        (([[1.0], [1.0, 2.0]], [[1.0]], [[0.0]], 1), "memory_mib: is no table"),
        (([[1.0]], [[1.0]], [[0.0]], "much"), "budget_mib: is no number"),
    ],
)
def test_bad_input_is_a_value_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(*arguments)


@pytest.mark.parametrize("gap", [0.0, 1e-9, 0.5, 1 - 2**-53])
def test_the_widest_numbers_end_in_an_answer(gap: float) -> None:
    least, most = 1e-60, 1e60
    solution = solve([[least, 0]], [[1, most]], [[1, 0], [0, 1]], 2 * least, gap)
    assert solution.choice == (0,) and solution.time_s == 1
    solution = solve([[2 * least, 0]], [[1, most]], [[1, 0], [0, 1]], least, gap)
    assert solution.choice == (1,) and solution.time_s == most
    mixed = solve([[most, least, 0]] * 3, [[least, 1, most]] * 3, np.eye(3) * most, 2 * least, gap)
    assert len(mixed.choice) == 3 and mixed.lower_bound_s <= mixed.time_s


@pytest.mark.slow
def test_many_layers_and_strategies_stay_within_memory() -> None:
    """10,000 layers of 300 strategies, all with their own price of change: a copy of that for each layer is 7 GB."""
    program = """
import resource
import numpy as np
from paddlenlp_galvatron.planner.solver import solve
random = np.random.default_rng(0)
tables = [random.random((10_000, 300)) + 1 for _ in range(2)]
solution = solve(*tables, random.random((300, 300)), 13_000.0, gap=0.05)
assert len(solution.choice) == 10_000 and solution.time_s <= solution.lower_bound_s / 0.95
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert int(ran.stdout) < 500


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_prints_what_it_says(language, capsys):
    page = (Path(__file__).parents[2] / "docs" / language / "solver.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    exec(program, {})
    assert capsys.readouterr().out.strip() == program.rpartition("# ")[2].strip()
