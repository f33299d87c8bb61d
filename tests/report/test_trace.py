"""The predicted time line: passes and waits of each stage follow each other without a gap, and end with the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from xml.etree import ElementTree

import pytest

from paddlenlp_galvatron.base.tracing import write_trace
from paddlenlp_galvatron.cost_model import CostModel
from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.trace import predicted_events, rank_names

from .test_breakdown import PLANS

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


def test_predicted_and_measured_are_drawn_over_each_other(tmp_path):
    """A lane for each stage's prediction, and for each rank, on one scale."""
    script = run_path(str(Path(__file__).parents[2] / "benchmarks" / "lay_traces.py"))
    plan, cost = PLANS["two stages"]
    plan = replace(plan, assumed=cost.assumed)
    events = predicted_events(plan, cost, cost.predict(plan))
    write_trace(tmp_path / "predicted.json", events, rank_names(plan))
    end = max(event["ts"] + event["dur"] for event in events)
    ranks = [event | {"pid": event["pid"] + rank} for event in events for rank in range(plan.stage_size)]
    steps = [
        event | {"ts": number * 9 * end + event["ts"] * length, "dur": event["dur"] * length}
        for number, length in enumerate((3, 2, 4))
        for event in [*ranks, {**events[0], "name": f"step {number}", "cat": "step", "ts": 0.0, "dur": end}]
    ]
    write_trace(tmp_path / "measured.json", steps, {})
    guess = script["predicted"](script["read"](tmp_path / "predicted.json"))
    truth = script["measured"](script["read"](tmp_path / "measured.json"))
    assert truth.length_ms == pytest.approx(2 * guess.length_ms)  # the shortest step
    drawn = ElementTree.fromstring(script["draw"](guess, truth))
    names = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert sum("predicted, stage" in name for name in names) == 2
    assert sum("measured, rank" in name for name in names) == plan.world_size
