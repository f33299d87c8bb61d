"""The simplest plan within a tolerance, and the best one with one strategy, are those that enumeration finds."""

import random
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddlenlp_galvatron.planner import SearchResult, search
from paddlenlp_galvatron.planner.question import Question

from .random_cost import RandomCost, every_plan, model_of
from .test_search import Problem, problem

ROUNDING = 1e-9
MIXED = {"num_gpus_per_node": 4, "settle_bsz": 4, "settle_chunk": 2, "sp_space": "tp", "tp_consec": True}
MIXED |= {"disable_ckpt": False, "disable_vtp": True, "embed_sdp": False, "context_mib": 0.0}


def mixed(seed: int, within: float) -> Problem:
    """A problem whose fastest plan mixes three strategies, for some seeds."""
    draw = random.Random(seed)
    memory = {"disable_sdp": draw.random() < 0.5, "memory_constraint": draw.uniform(0.3, 1.5)}
    _, _, options = problem(seed, **MIXED | memory, simplest_within=within, fine_grained_mode=True)
    return [model_of(4)], RandomCost([model_of(4)], options, seed), options


def check_against_enumeration(asked: Problem) -> SearchResult:
    """No plan within the tolerance has fewer strategies."""
    result, plans = search(*asked), list(every_plan(*asked))
    if not plans:
        assert result.best is None
        return result
    assert result.best and result.fastest and result.fastest_gap <= ROUNDING
    fastest_s = min(one.time_s for one in plans)
    most_s = fastest_s * (1 + asked[2].simplest_within / 100)
    assert result.fastest.time_s == pytest.approx(fastest_s, rel=ROUNDING)
    assert result.best in plans and result.best.time_s <= most_s * (1 + ROUNDING)
    assert result.best.strategies == min(one.strategies for one in plans if one.time_s <= most_s)
    uniform_s = min((one.time_s for one in plans if one.strategies == 1), default=inf)
    found_s = result.uniform.time_s if result.uniform else inf
    assert found_s == pytest.approx(uniform_s, rel=ROUNDING) == result.uniform_bound_s
    return result


@pytest.mark.parametrize("within", [0.5, 20.0])
@pytest.mark.parametrize(("types", "end"), [(1, 16), (2, 14), (3, 6)])
def test_equals_exhaustive_enumeration(types: int, end: int, within: float) -> None:
    fixed = {"simplest_within": within, "fine_grained_mode": True}
    found = [check_against_enumeration(problem(seed, types, **fixed)) for seed in range(1, end)]
    assert any(one.best for one in found)


@pytest.mark.parametrize("within", [0.5, 4.0])
@pytest.mark.parametrize("seed", [154, 160, 190])
def test_equals_exhaustive_enumeration_where_the_fastest_plan_has_three_strategies(seed: int, within: float) -> None:
    found = check_against_enumeration(mixed(seed, within))
    assert found.fastest and found.fastest.strategies == 3


@given(st.integers(0, 10**6), st.floats(0, 100), st.integers(1, 3), st.booleans())
@example(107, 0.0, 2, False)  # the best strategy of all layers is beaten for one type's
def test_a_tolerance_changes_the_plan_alone(seed: int, within: float, types: int, interleaved: bool) -> None:
    fixed: dict[str, Any] = {"max_virtual_pp_deg": 2 if interleaved and types == 1 else 1}
    models, cost, options = problem(seed, types, **fixed)
    alone, exact = search(models, cost, options, compared=False), search(models, cost, options)
    result = search(models, cost, options.model_copy(update={"simplest_within": within}))
    assert exact.best == alone.best == exact.fastest and alone.uniform_bound_s is None
    assert (result.lower_bound_s, result.outcomes) == (alone.lower_bound_s, alone.outcomes)
    assert result.fastest_gap == alone.fastest_gap <= result.gap
    assert result.fastest == alone.fastest and result.uniform == exact.uniform
    if result.best is None or result.fastest is None:
        return
    assert result.time_s <= result.fastest.time_s * (1 + within / 100) * (1 + ROUNDING)
    assert result.best.strategies <= result.fastest.strategies
    assert result.best.prediction == cost.predict(result.plan) and result.best.fits(options.memory_gib * 1024)
    uniform = search(models, cost, options.model_copy(update={"fine_grained_mode": False}))
    assert uniform.time_s == pytest.approx(result.uniform.time_s if result.uniform else inf, rel=0.1 * interleaved)


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        ({"model_size": "llama3-70b", "device": "a100-80gb", "gpus": 128, "memory_constraint": 40}, 3, 3),
        ({"model_size": "llama3-70b", "device": "a100-80gb", "gpus": 64, "batch": 512}, 4, 2),
    ],
)
def test_usual_models_have_few_strategies(asked: dict[str, Any], before: int, after: int) -> None:
    names = {"gpus": "world_size", "batch": "settle_bsz"}
    result = Question.of(
        {"settle_bsz": 512, "gap": 0} | {names.get(name, name): value for name, value in asked.items()}
    ).search()
    assert result.best and result.fastest and result.fastest_gap < ROUNDING
    assert (result.fastest.strategies, result.best.strategies) == (before, after)
    assert result.plan.metadata["predicted"]["gap"] == result.gap
