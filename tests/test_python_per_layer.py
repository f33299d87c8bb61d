"""Python's part of a layer does not grow unseen: calls into Paddle, counted."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.profiles.analytic import CHECKPOINT_CALLS, FUSED_CALLS, LAYER_CALLS

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "python_per_layer.py"
# 75, 89, 95, 83, 91, 103, 104 and 114 under Paddle 3.3.1
MOST = {"plain": 85, "recompute": 100, "bf16": 110, "tp": 93, "tp, Megatron-SP": 102, "Ulysses": 115}
MOST |= {"context parallel": 116, "zero3": 125}
LARGEST_SHARE = 0.3  # of a 7B layer's time on one GPU


def test_a_layer_makes_few_calls_and_fused_kernels_fewer():
    benchmark = runpy.run_path(str(BENCHMARK))
    benchmark["cost"].__globals__["TIMED"] = 2  # calls are counted, whatever they take
    costs = {name: benchmark["cost"](*of) for name, of in benchmark["STRATEGIES"].items()}
    assert all(20 < costs[name].calls <= most for name, most in MOST.items())
    assert set(costs) == set(MOST) and all(cost.share < LARGEST_SHARE for cost in costs.values())
    assert all(costs[name].calls > costs["plain"].calls for name in MOST if name != "plain")
    assert all(8 * cost.share < 1 for cost in costs.values())  # 8 ranks share a layer: a GPU still does not wait
    fused = benchmark["fused"](costs["plain"]).calls
    assert fused < costs["plain"].calls - 10
    again = costs["recompute"].calls - costs["plain"].calls
    priced = LAYER_CALLS, FUSED_CALLS, CHECKPOINT_CALLS  # in derived profiles
    assert (costs["plain"].calls, fused, again) == tuple(pytest.approx(calls, abs=4) for calls in priced)
