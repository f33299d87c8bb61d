"""Searches that begin with known plans, and searches whose time ends before they do."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from cost_examples import MODEL, example

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.planner import FamilyOutcome, SearchOptions, search

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
        with pytest.raises(UserError, match="were given up before one was found"):
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
