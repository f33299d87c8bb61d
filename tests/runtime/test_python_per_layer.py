"""Python's part of a layer does not grow unseen: calls into Paddle, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.profiles.analytic import CHECKPOINT_CALLS, FUSED_CALLS, GROUPED, LAYER_CALLS

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "python_per_layer.py"
# 54, 68, 74, 62, 70, 82, 79, 80 and 110 under Paddle 3.3.1
MOST = {"plain": 60, "recompute": 75, "bf16": 85, "tp": 70, "tp, Megatron-SP": 80, "Ulysses": 90}
MOST |= {"context parallel": 90, "zero3": 90, "experts": 110}
LOOKED_UP = 3  # calls more of PaddleNLP's own linear layers, each of which looks up flags before its product
LINEAR = 7
Q_AND_K, MLP = 17, 5  # calls of Qwen3's two norms more; of an MLP, which a layer of experts has not
PROGRAM = """
import json, runpy, sys
benchmark = runpy.run_path(sys.argv[1])
benchmark["cost"].__globals__["TIMED"] = 2  # calls are counted, not timed
costs = {name: benchmark["cost"](*of) for name, of in benchmark["STRATEGIES"].items()}
fused = benchmark["fused"](costs["plain"]).calls
numbers = ({name: getattr(cost, part) for name, cost in costs.items()} for part in ("calls", "share"))
print(json.dumps([fused, *numbers]))
"""
LARGEST_SHARE = 0.3  # of a 7B layer's time on one GPU


def test_a_layer_makes_few_calls_and_fused_kernels_fewer():
    ran = subprocess.run([sys.executable, "-c", PROGRAM, BENCHMARK], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    fused, calls, shares = json.loads(ran.stdout.splitlines()[-1])
    assert all(20 < calls[name] <= most for name, most in MOST.items()), calls
    assert set(calls) == set(MOST) and all(share < LARGEST_SHARE for share in shares.values())
    assert all(calls[name] > calls["plain"] for name in MOST if name != "plain")
    assert all(8 * share < 1 for share in shares.values())  # 8 ranks share a layer: a GPU still does not wait
    assert fused < calls["plain"] - 10
    # As derived profiles price them: those of PaddleNLP's layer, that published runs have.
    again, looked_up = calls["recompute"] - calls["plain"], LINEAR * LOOKED_UP
    priced = LAYER_CALLS, FUSED_CALLS, CHECKPOINT_CALLS
    counted = calls["plain"] + looked_up, fused + looked_up, again
    assert counted == tuple(pytest.approx(one, abs=4) for one in priced)
    experts = calls["experts"] - calls["plain"]
    assert experts == pytest.approx(GROUPED.routing + Q_AND_K - MLP, abs=4)
