"""The predicted time line: passes and waits of each stage follow each other without a gap, and end with the step."""

from dataclasses import replace
from itertools import pairwise

import pytest
from cost_model.test_facts import PLANS

from paddlenlp_galvatron.cost_model import CostModel
from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.trace import predicted_events, rank_names

PASSES = ("forward", "backward", "wait", "sync")


@pytest.mark.parametrize(("plan", "cost"), PLANS.values(), ids=PLANS)
def test_passes_and_waits_fill_the_step(plan: Plan, cost: CostModel):
    plan = replace(plan, assumed=cost.assumed)
    prediction = cost.predict(plan)
    events = predicted_events(plan, cost, prediction)
    assert {event["pid"] for event in events} == set(rank_names(plan))
    for rank in rank_names(plan):
        mine = [event for event in events if event["pid"] == rank]
        passes = sorted((event for event in mine if event["cat"] in PASSES), key=lambda event: event["ts"])
        for before, after in pairwise(passes):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
        assert passes[0]["ts"] == 0
        assert passes[-1]["ts"] + passes[-1]["dur"] == pytest.approx(prediction.time_s * 1e6)
        names = [event["name"] for event in passes if event["cat"] in PASSES[:2]]
        assert sorted(names) == sorted(
            f"{kind} {number}" + (f", chunk {chunk}" if plan.chunks > 1 else "")
            for kind in PASSES[:2]
            for number in range(plan.micro_batches)
            for chunk in range(plan.chunks)
        )
        inside = [event for event in mine if event["cat"] not in PASSES]
        busy = sum(event["dur"] for event in passes if event["cat"] != "wait")
        assert sum(event["dur"] for event in inside) == pytest.approx(busy, rel=1e-6)
