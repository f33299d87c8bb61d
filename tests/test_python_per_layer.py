"""Python's part of a layer does not grow unseen: calls into Paddle, counted."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("paddle")

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "python_per_layer.py"
MOST = {"plain": 85, "recompute": 100, "bf16": 110}  # 74, 87 and 94 under Paddle 3.3.1
LARGEST_SHARE = 0.3  # of a 7B layer's time on one GPU


def test_a_layer_makes_few_calls_and_fused_kernels_fewer():
    benchmark = runpy.run_path(str(BENCHMARK))
    costs = {name: benchmark["cost"](**options) for name, options in benchmark["STRATEGIES"].items()}
    assert all(20 < costs[name].calls <= most for name, most in MOST.items())
    assert all(cost.share < LARGEST_SHARE for cost in costs.values())
    assert benchmark["fused"](costs["plain"]).calls < costs["plain"].calls - 10
