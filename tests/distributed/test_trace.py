"""`galvatron train --trace`: the measured time line of two ranks in a pipeline, in the shape of the predicted one."""

import json
from itertools import pairwise

import pytest

pytest.importorskip("paddle")

from small_model import MODEL

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, write_plan

MICRO_BATCHES = 3


def test_every_rank_reports_its_passes_collectives_waits_optimizer_and_data(galvatron, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    plan = uniform_plan(
        layers=2, world_size=2, global_train_batch_size=6, chunks=MICRO_BATCHES, pp_deg=2,
        assumed=Assumptions(seq_length=16),
    )  # fmt: skip
    write_plan(plan, "plan.json")
    words = ["--input_dir", "random", "--max_steps", 4, "--trace", "2-3", "--save_strategy", "no", "--timeout", 600]
    ran = galvatron("train", "plan.json", "--model", "model.json", *words)
    assert ran.code == 0, ran.err
    assert "time lines in output/trace.json; open it in https://ui.perfetto.dev" in ran.out
    events = json.loads((tmp_path / "output" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0 and all(event["dur"] >= 0 for event in spans)
    for rank in (0, 1):
        mine = [event for event in spans if event["pid"] == rank]
        steps = {event["name"]: event for event in mine if event["cat"] == "step"}
        assert list(steps) == ["step 2", "step 3"]
        for step in steps.values():
            within = [e for e in mine if step["ts"] <= e["ts"] < step["ts"] + step["dur"] and e is not step]
            assert all(e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1 for e in within)
            names = [event["name"] for event in within]
            for kind in ("forward", "backward"):
                assert [name for name in names if name.startswith(kind)] == [
                    f"{kind} {n}" for n in range(MICRO_BATCHES)
                ]
            assert {"data", "optimizer", "reduce gradients", "wait", "all_reduce"} <= set(names)
        # A stage works on one pass at a time.
        passes = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in mine if e["cat"] in ("forward", "backward", "wait", "optimizer")
        )
        assert all(stop <= start + 1 for (_, stop), (start, _) in pairwise(passes))
