"""The quick start leaves a plan that every command of its page takes as it is. Its measurements are derived here, and
it stops before training; `make quickstart` does all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli import quickstart
from paddlenlp_galvatron.plan import read_plan

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def output(galvatron, tmp_path, monkeypatch):
    """Of a quick start in the current folder."""
    monkeypatch.chdir(tmp_path)

    def profile(output: Path, nproc: int) -> None:
        model = ("--model_size", output / quickstart.MODEL, "--seq_length", quickstart.SEQ_LENGTH)
        what = ("--mixed_precision", "fp32", "--profile_mode", "batch", "--num_gpus_per_node", nproc)
        folder = output / "profiles"
        assert galvatron("profile", "all", "--analytic", "a100", *model, *what, "--output", folder).code == 0
        for file in folder.iterdir():  # of no device that reserves more than this model takes
            content = json.loads(file.read_text())
            content["galvatron"]["fingerprint"].pop("device", None)
            file.write_text(json.dumps(content))

    monkeypatch.setattr(quickstart, "_prepare_data", lambda output: None)
    monkeypatch.setattr(quickstart, "_profile", profile)
    ran = galvatron("quickstart", "--dry_run")
    assert ran.code == 0, ran.err
    return tmp_path / "runs" / "quickstart"


def test_its_plan_is_taken_by_every_command_of_the_page(output, galvatron, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    known = read_plan(output / "plan.json").metadata["predicted"]["time_s"]
    for language in ("en", "zh"):
        text = (DOCS / language / "quickstart.md").read_text()
        commands = set(re.findall(r"galvatron ((?:plan show|explain|report) runs/[^`\n]+)", text))
        assert len(commands) == 3
        for command in commands:
            ran = galvatron(*command.partition(" --log")[0].split())
            assert ran.code == 0, ran.err
            if command.startswith("explain"):
                assert f"{known:.4g} s a step" in ran.out and "no plan of it" not in ran.out
                tables = ran.out.split("time of a step")[1].split("the best plans")[0] + ran.out.split("what if")[1]
                assert "…" not in tables and "-0.0" not in tables
    assert galvatron("plan", "trace", output / "plan.json", "-o", "trace.json").code == 0
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert galvatron("report", output / "plan.json").code == 0
