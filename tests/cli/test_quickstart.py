"""`scripts/quickstart.sh`, all of it but for its measurements, which are derived, and the training, which is shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_galvatron.plan import read_plan

ROOT = Path(__file__).parents[2]
# `galvatron` with less work: profiles by arithmetic, of a device whose reserve would be more than this model takes.
QUICK = """
import runpy, sys
words = sys.argv[1:]
if words[:2] == ["profile", "hardware"]:
    raise SystemExit
if words[:2] == ["profile", "model"]:
    words = ["profile", "all", *words[2:3], "--analytic", "a100", "--seq", "128", "--mixed_precision", "fp32"]
    words += ["--profile_mode", "batch", "--num_gpus_per_node", "4", "--output", "runs/quickstart/profiles"]
if words[0] == "search":
    words += ["--context_mib", "0"]
if words[0] == "train":
    words.append("--dry_run")
if words[0] == "report":
    words = [word for word in words if "log" not in word]
sys.argv[1:] = words
runpy.run_module("paddlenlp_galvatron", run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a checkout in which the quick start was run."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("scripts/quickstart.sh", "examples/tiny-qwen2/config.json"):
        (folder / part).parent.mkdir(parents=True)
        shutil.copy(ROOT / part, folder / part)
    (folder / "bin").mkdir()
    (folder / "quick.py").write_text(QUICK)
    (folder / "bin/galvatron").write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/quick.py "$@"\n')
    (folder / "bin/galvatron").chmod(0o755)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120"}
    ran = subprocess.run(
        ["sh", "scripts/quickstart.sh"], cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [f"[{part}/6]" in ran.stdout for part in range(1, 7)] == [True] * 6
    return folder


def test_it_makes_what_its_page_names(folder):
    plan = read_plan(folder / "runs/quickstart/plan.json")
    assert len(plan.layers) == 8 and plan.world_size == 4
    assert all((folder / "runs/quickstart" / name).exists() for name in ("data/python.idx", "profiles", "report.html"))


def test_its_plan_is_taken_by_every_command_of_the_page(folder, galvatron, monkeypatch):
    monkeypatch.chdir(folder)
    for language in ("en", "zh"):
        text = (ROOT / "docs" / language / "quickstart.md").read_text()
        commands = set(re.findall(r"galvatron ((?:plan show|explain|report) runs/[^`\n]+)", text))
        assert len(commands) == 3
        for command in commands:
            ran = galvatron(*command.partition(" --log")[0].split())
            assert ran.code == 0, ran.err
