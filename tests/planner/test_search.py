"""The whole search finds the optimum of exhaustive enumeration, and its answers are consistent and monotone."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import galvatron_dp_core
import pytest
from cost_examples import MODEL, example
from hypothesis import assume, given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import Infeasible, UserError
from paddlenlp_galvatron.model.layer import PARTLY
from paddlenlp_galvatron.plan import ModelShape, read_plan, write_plan
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.planner import FamilyOutcome, SearchOptions, bounds, branch_and_bound, branches, search
from paddlenlp_galvatron.planner.branches import Branches

from .random_cost import RandomCost, best_by_enumeration, model_of

Problem = tuple[list[ModelShape], RandomCost, SearchOptions]


def problem(seed: int, types: int = 1, **fixed: Any) -> Problem:
    """A small random search: cluster, space, batch and memory all drawn; layers of one type or of several."""
    draw = random.Random(seed)
    layers = draw.choice((1, 2, 3, 3, 4)) if types == 1 else draw.choice((types, 3, 4))
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
        "simplest_within": 0.0,
    }
    if values["sp_space"] == "tp":
        values["tp_consec"] = draw.random() < 0.7
    if layers == 4:
        values |= {"disable_sdp": True, "disable_ckpt": True, "settle_chunk": draw.choice((1, 2))}
    options = SearchOptions.from_mapping({"gap": 0} | values | fixed)
    models = [model_of(layers)]
    if types > 1:
        counts = [1] * types
        for _ in range(layers - types):
            counts[draw.randrange(types)] += 1
        models = [model_of(n, draw.choice((48, 96, 192)), draw.choice((None, 6, 24))) for n in counts]
    return models, RandomCost(models, options, seed), options


def check_against_enumeration(seed: int, types: int = 1, loose: list[int] | None = None, **fixed: Any) -> bool:
    """Whether there was a plan. `loose`: gets the seed where the bound is below the best plan; None: it may not be."""
    models, cost, options = problem(seed, types, **fixed)
    cost.neighbours = seed % 2 == 1
    cost.options = replace(cost.options, freed=(None, 0.0, 0.8)[seed % 3])  # of working memory, that allocators keep
    result, best = search(models, cost, options), best_by_enumeration(models, cost, options)
    if best == inf:
        assert result.best is None, seed
        assert result.need is None or result.need.enough_mib > options.memory_constraint * 1024
        return False
    assert result.best is not None, seed
    assert result.time_s / result.plan.global_batch == pytest.approx(best, rel=1e-9), seed
    assert result.lower_bound_s / result.plan.global_batch <= best * (1 + 1e-9), seed
    if result.gap > 1e-9:
        assert loose is not None, seed
        loose.append(seed)
    if types == 1:
        assert find_faults(result.plan, models[0]) == []
    assert max(stage.memory.total_mib for stage in result.best.prediction.stages) <= options.memory_constraint * 1024
    return True


# Enumeration of the problem of seed 0 takes as long as that of all the others.
@pytest.mark.parametrize(("types", "end"), [(1, 20), (2, 14), (3, 10)])
def test_equals_exhaustive_enumeration(types: int, end: int) -> None:
    feasible = sum(check_against_enumeration(seed, types) for seed in range(1, end))
    assert end / 2 < feasible < end - 1


@pytest.mark.parametrize("lever", ["recompute_parts", "offload_activations"])
def test_a_lever_of_layers_equals_exhaustive_enumeration(lever: str) -> None:
    used = 0
    narrow = {"disable_ckpt": False, "disable_sdp": True, "disable_vtp": True, "sp_space": "tp", "num_gpus_per_node": 2}
    for seed in range(8):
        _, _, options = problem(seed, **{lever: True}, settle_bsz=4, **narrow)
        models = [model_of(2)]
        cost = RandomCost(models, options, seed)
        result, best = search(models, cost, options), best_by_enumeration(models, cost, options)
        assert (result.best is None) is (best == inf), seed
        if result.best is not None:
            assert result.time_s / result.plan.global_batch == pytest.approx(best, rel=1e-9), seed
            used += any(layer.recompute in PARTLY or layer.offload for layer in result.plan.layers)
    assert used > 1


def test_context_parallel_equals_exhaustive_enumeration() -> None:
    fixed = {"max_cp_deg": 6, "disable_sdp": True, "disable_ckpt": True, "settle_chunk": 2}
    chosen = 0
    for seed in range(13, 32):
        if check_against_enumeration(seed, **fixed):
            plan = search(*problem(seed, **fixed)).plan
            chosen += any(part.context > 1 for part in (*plan.layers, plan.vocab))
    assert chosen > 2


def test_parts_of_the_ranks_equal_exhaustive_enumeration() -> None:
    chosen = 0
    fixed = {"num_nodes": 2, "settle_bsz": 4, "disable_ckpt": True, "default_dp_type": "zero2", "disable_vtp": True}
    for seed in (1, 2, 21, 26, 28):
        fixed |= {"num_gpus_per_node": 2, "sp_space": "tp", "tp_consec": True, "disable_sdp": seed % 2 == 0}
        if check_against_enumeration(seed, **fixed):
            plan = search(*problem(seed, **fixed)).plan
            chosen += any(part.sharding for part in (*plan.layers, plan.vocab))
    assert chosen == 3


@pytest.mark.parametrize("seeds", [range(1, 12), pytest.param(range(100), marks=pytest.mark.slow)], ids=["some", "all"])
def test_crooked_switching_prices_leave_a_gap_but_never_a_wrong_bound(seeds: range) -> None:
    gaps = []
    for seed in seeds:
        model, cost, options = problem(seed, sequence_parallel=False, num_gpus_per_node=4)
        cost.crooked = True
        result, best = search(model, cost, options), best_by_enumeration(model, cost, options)
        if result.best is None:
            assert best == inf
            continue
        batch = result.plan.global_batch
        assert result.lower_bound_s / batch <= best * (1 + 1e-9) <= result.time_s / batch * (1 + 2e-9), seed
        gaps.append(result.gap)
    assert sum(gap < 1e-9 for gap in gaps) > len(gaps) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("types", "seeds"), [(1, 600), (2, 100), (3, 100)])
def test_equals_exhaustive_enumeration_often(types: int, seeds: int) -> None:
    """The bound is rarely below the best plan: where the search gives a family of plans up."""
    loose: list[int] = []
    for seed in range(seeds):
        check_against_enumeration(seed, types, loose)
    assert len(loose) <= seeds // 50, loose


WIDER = {
    "disable_ckpt": False,
    "recompute_parts": True,
    "disable_sdp": False,
    "disable_vtp": False,
    "pipeline_type": None,
    "embed_sdp": None,
    "fine_grained_mode": True,
    "sp_space": "tp+sp",
    "tp_consec": False,
    "max_cp_deg": 6,
}


def samples_per_s(seed: int, types: int = 1, **changed: Any) -> float:
    model, cost, options = problem(seed, types, **changed)
    result = search(model, cost, options)
    return result.best.samples_per_s if result.best else 0.0


@given(seed=st.integers(0, 2**32), more=st.floats(1, 3), types=st.integers(1, 3))
def test_more_memory_is_never_slower(seed: int, more: float, types: int) -> None:
    _, _, options = problem(seed, types)
    wide = samples_per_s(seed, types, memory_constraint=options.memory_constraint * more)
    assert wide >= samples_per_s(seed, types) * (1 - 1e-9)


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(WIDER)))
def test_a_wider_space_is_never_slower(seed: int, name: str) -> None:
    _, _, options = problem(seed)
    assume(name != "sp_space" or options.tp_consec)  # Ulysses and strided groups exclude each other
    assume(name != "tp_consec" or options.sp_space == "tp")
    assume(name != "embed_sdp" or options.allows("sdp"))  # a fixed embed_sdp goes beyond a space without sdp
    assert samples_per_s(seed, **{name: WIDER[name]}) >= samples_per_s(seed) * (1 - 1e-9)


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60), top_k=st.sampled_from((1, 5)))
def test_a_bound_holds_wherever_the_search_is_cancelled(seed: int, steps: int, top_k: int) -> None:
    models, cost, options = problem(seed, top_k=top_k)
    cancel, seen = galvatron_dp_core.Cancel(), []
    if steps == 0:
        cancel.cancel()

    def watch(state: branch_and_bound.SearchState) -> None:
        seen.append(state)
        if len(seen) == steps:
            cancel.cancel()

    stopped, exact = search(models, cost, options, watch=watch, cancel=cancel), search(models, cost, options)
    if stopped.best is None:
        assert cancel.cancelled or exact.best is None
        return
    assert stopped.lower_bound_s <= exact.time_s * (1 + 1e-9) and exact.time_s <= stopped.time_s * (1 + 1e-9)
    assert cancel.cancelled or stopped.time_s == exact.time_s


def test_more_batches_are_never_slower() -> None:
    for seed in range(20):
        one = {"settle_bsz": -1, "settle_chunk": -1, "min_bsz": 6, "max_bsz": 6, "bsz_scale": 6}
        assert samples_per_s(seed, **one | {"max_bsz": 12}) >= samples_per_s(seed, **one) * (1 - 1e-9)


def test_the_best_families_are_kept_in_order() -> None:
    model, cost, options = problem(3, top_k=1000, memory_constraint=50, settle_bsz=12)
    result = search(model, cost, options)
    assert result.best is not None and len(result.runners_up) > 3
    speeds = [candidate.samples_per_s for candidate in (result.best, *result.runners_up)]
    assert speeds == sorted(speeds, reverse=True)
    kept = {(c.plan.micro_batches, len(c.plan.stages), c.plan.schedule) for c in (result.best, *result.runners_up)}
    assert len(kept) == len(speeds) == sum(outcome is FamilyOutcome.SOLVED for outcome in result.outcomes.values())


def test_the_plan_says_what_was_predicted_and_searched(tmp_path: Path) -> None:
    model, cost, options = problem(3, memory_constraint=50)
    result = search(model, cost, options)
    write_plan(result.plan, tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    assert plan == result.plan
    assert plan.metadata["predicted"]["time_s"] == pytest.approx(cost.predict(plan).time_s)
    assert plan.metadata["predicted"]["gap"] == 0
    assert plan.metadata["searched_from"]["model_fingerprint"] == model[0].fingerprint


def test_where_nothing_fits_the_need_is_enough_and_least() -> None:
    model, cost, options = problem(3, memory_constraint=0.01)
    need = search(model, cost, options).need
    assert need is not None and "the smallest plan needs" in str(need)
    with pytest.raises(Infeasible, match=r"no plan fits: the smallest plan needs .* GiB per GPU"):
        search(model, cost, options).require()
    for share, fits in ((0.999, False), (1.000001, True)):
        _, _, changed = problem(3, memory_constraint=need.enough_mib * share / 1024)
        assert (search(model, cost, changed).best is not None) is fits


def test_a_batch_that_nothing_divides_is_infeasible() -> None:
    model, cost, options = problem(
        3, num_gpus_per_node=4, settle_bsz=3, disable_tp=True, disable_sp=True, disable_pp=True
    )
    with pytest.raises(Infeasible, match="splits batch, heads and ranks"):
        search(model, cost, options).require()


@pytest.mark.parametrize(
    ("limit", "lower"), [("MOST_FAMILIES", "or give settle_chunk"), ("MOST_PRICES", "or give settle_chunk")]
)
def test_a_space_beyond_the_limits_is_refused_with_what_to_lower(monkeypatch, limit: str, lower: str) -> None:
    monkeypatch.setattr(branches, limit, 0)
    with pytest.raises(UserError, match=lower):
        search(*problem(3))


@pytest.mark.parametrize("limit", ["MOST_COMPARED", "MOST_STRATEGIES"])
def test_a_family_with_too_many_strategies_is_left_with_a_gap(monkeypatch, limit: str) -> None:
    model, cost, options = problem(3)
    best = search(model, cost, options)
    widths = sorted(
        {len(some) for each in Branches(cost, options).strategies().values() for one in each for some in one.layers}
    )
    assert len(widths) > 1
    monkeypatch.setattr(bounds, limit, widths[-1] - 1)
    result = search(model, cost, options)
    assert result.too_wide and "max_tp_deg" in result.left_out[0]
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9) <= result.time_s * (1 + 2e-9)
    monkeypatch.setattr(bounds, limit, 0)
    with pytest.raises(UserError, match="given up"):
        search(model, cost, options).require()


def test_a_sequence_beyond_the_models_positions_is_reported() -> None:
    model, cost, options = problem(3, seq_length=4096)
    with pytest.raises(UserError, match="seq_length: 4096 is beyond the 64 positions"):
        search(model, cost, options)


def test_options_that_contradict_the_cost_model_are_refused() -> None:
    model, cost, options = problem(3)
    other = options.model_copy(update={"sequence_parallel": not options.sequence_parallel, "num_nodes": 7})
    with pytest.raises(UserError, match="make them agree"):
        search(model, cost, other)


def test_a_search_reports_how_far_it_is():
    models, cost, options = problem(3, memory_constraint=4, fine_grained_mode=True)
    reported: list[branch_and_bound.SearchState] = []
    result = search(models, cost, options, watch=reported.append)
    assert result.best and reported[-1].done == reported[-1].families and reported[-1].best == result.best.samples_per_s
    for before, after in pairwise(reported):
        assert before.done <= after.done and before.best <= after.best <= after.limit * (1 + 1e-9)
        assert after.limit <= before.limit * (1 + 1e-9)


@pytest.mark.parametrize("gap", [1e-3, 0.05, 0.5])
def test_a_search_within_a_gap_proves_no_more_than_the_truth(gap: float) -> None:
    for chunks in (1, 2):
        model, cost, options = problem(3, max_virtual_pp_deg=chunks)
        exact = search(model, cost, options)
        near = search(model, cost, options.model_copy(update={"gap": gap}))
        assert near.fastest and near.lower_bound_s <= exact.time_s * (1 + 1e-9) <= near.fastest.time_s * (1 + 2e-9)
        assert near.fastest_gap <= max(gap, exact.fastest_gap) * (1 + 1e-6)


def test_a_search_ends_in_time_with_what_it_has() -> None:
    model, cost, options = problem(3)
    result = search(model, cost, options.model_copy(update={"time_limit": 1e-9}))
    for ended in (partial(result.so_far, interrupted=False), result.require):
        with pytest.raises(UserError, match="time_limit: no plan was found"):
            ended()


VALUES = {
    "num_nodes": 2,
    "num_gpus_per_node": 4,
    "settle_bsz": 32,
    "seq_length": 512,
    "memory_constraint": 0.9,
    "simplest_within": 0,
}
WIDE = {"max_cp_deg": 4, "max_virtual_pp_deg": 2, "recompute_parts": True, "sp_space": "tp+sp"}


@pytest.mark.parametrize("more", [{}, WIDE], ids=["plain", "wide"])
def test_what_is_known_changes_no_answer_and_helps_where_the_time_is_over(more: dict[str, object]) -> None:
    options, cost = SearchOptions.from_mapping({"gap": 0} | VALUES | more), example()
    exact = search(MODEL, cost, options)
    assert exact.gap == 0
    other = search(MODEL, cost, options.model_copy(update={"settle_chunk": exact.plan.micro_batches // 2 or 2}))
    known = [other.plan, replace(exact.plan, micro_batches=7), replace(exact.plan, stages=(1, 2, 1))]
    assert search(MODEL, cost, options, known=known).time_s == pytest.approx(exact.time_s)

    stopped = search(MODEL, cost, options, known=known, seconds=0.0)
    assert stopped.time_s <= other.time_s * (1 + 1e-9) and FamilyOutcome.GIVEN_UP in stopped.outcomes.values()
    assert 0 < stopped.lower_bound_s <= exact.time_s <= stopped.time_s
    assert stopped.gap == pytest.approx(1 - stopped.lower_bound_s / stopped.time_s) and stopped.gap > 0

    nothing = search(MODEL, cost, options, seconds=0.0)
    if nothing.best is None:
        assert nothing.time_s == inf and nothing.need is None
        with pytest.raises(UserError, match="no plan was found in this time"):
            nothing.require()


def test_a_plan_that_does_not_fit_or_that_the_options_exclude_is_no_answer() -> None:
    large = search(MODEL, example(), SearchOptions.from_mapping({"gap": 0} | VALUES | {"memory_constraint": 8})).plan
    options = SearchOptions.from_mapping({"gap": 0} | VALUES)
    exact = search(MODEL, example(), options)
    assert (
        exact.time_s
        > search(MODEL, example(), SearchOptions.from_mapping({"gap": 0} | VALUES | {"memory_constraint": 8})).time_s
    )
    assert search(MODEL, example(), options, known=[large]).time_s == pytest.approx(exact.time_s)
    for excluded in ({"max_tp_deg": 1}, {"disable_vtp": True}, {"disable_pp": True}):
        narrow = SearchOptions.from_mapping({"gap": 0} | VALUES | excluded)
        found = search(MODEL, example(), narrow, known=[exact.plan])
        assert found.time_s == pytest.approx(search(MODEL, example(), narrow).time_s) and found.time_s > exact.time_s
