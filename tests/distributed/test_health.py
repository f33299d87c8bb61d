"""A run prints its health from its log, and warns of a plan whose prediction does not hold."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, write_plan

MODEL = small_config(layers=1)
STEP_S = 10.0  # no step of this model takes nearly as long


def test_a_run_shows_its_health_and_warns_once(galvatron, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    plan = uniform_plan(layers=1, world_size=1, global_train_batch_size=2, assumed=Assumptions(seq_length=16))
    predicted = {"time_s": STEP_S, "stages": [{"memory_mib": 1e6}]}
    write_plan(replace(plan, metadata={"predicted": predicted}), "plan.json")
    words = ["--input_dir", "random", "--max_steps", 60, "--logging_steps", 5, "--peak_tflops", 1]
    ran = galvatron("train", "plan.json", "--model", "model.json", *words)
    lines = " ".join(ran.out.split())
    assert ran.code == 0
    assert "predicted 10 s" in lines and "MFU" in lines and "predicted 976.6 GiB" in lines
    assert lines.count("warning: a step takes") == 1 and lines.count("warning: stage 0 needs") == 1
    assert "galvatron profile computation" in lines and "galvatron profile memory" in lines
