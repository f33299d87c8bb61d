"""The runtime's benchmark compares equal work: both sides reach the same losses.

PaddleNLP's side is started with the arguments of `galvatron plan to-paddlenlp` for the plan, so this proves that too.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp4", "tp2-dp2", "tp2-dp2-sp", "pp2-tp2-sp", "recompute", "ulysses", "zero2"])
def test_both_sides_train_alike(plan):
    command = [sys.executable, "benchmarks/runtime.py", "--plan", plan, "--steps", "1", "--rounds", "1", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for row in json.loads(ran.stdout):
        assert row["max_loss_diff"] < 1e-5
        assert row["ours_ms"] > 0
