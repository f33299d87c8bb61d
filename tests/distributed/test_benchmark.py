"""The runtime's benchmark compares equal work: both sides reach the same losses.

PaddleNLP's side is started with the arguments of `galvatron plan to-paddlenlp` for the plan, so this proves that too.
"""

import pytest

from .step_speed import BENCHMARKS, compare


@pytest.mark.slow
@pytest.mark.started("PaddleNLP's Trainer changes its process as no rank of ours does")
@pytest.mark.parametrize("plan", ["dp4", "tp2-dp2", "tp2-dp2-sp", "pp2-tp2-sp", "recompute", "ulysses", "zero2"])
def test_both_sides_train_alike(plan, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    row = compare(plan, steps=1, rounds=1)
    assert row["max_loss_diff"] < 1e-5
    assert row["ours_ms"] > 0
