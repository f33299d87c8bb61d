"""A search's answer for programs."""

from __future__ import annotations

from dataclasses import replace

from cost_examples import example

from paddlenlp_galvatron.plan import LayerStrategy, Plan, VocabStrategy
from paddlenlp_galvatron.planner import Need, SearchResult
from paddlenlp_galvatron.report.search import summary


def test_the_layers_of_a_stage_of_several_chunks_are_one_range_each() -> None:
    cost = example()
    plan = Plan(8, 32, 4, (1, 1, 1, 1), (LayerStrategy(2),) * 4, VocabStrategy(2), chunks=2, assumed=cost.assumed)
    for reported, one in (([[0, 0], [2, 2]], plan), ([[0, 1]], replace(plan, stages=(2, 2), chunks=1))):
        need = replace(Need.of(one, cost), stage=0)
        assert summary(SearchResult(None, 0.0, 0.0, {}, need=need), 0.0, 0.0)["binds"]["layers"] == reported
