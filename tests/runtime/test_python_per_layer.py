"""Python's part of a layer does not grow unseen: calls into Paddle, counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.profiles.analytic import CHECKPOINT_CALLS, FUSED_CALLS, GROUPED, LAYER_CALLS

PROGRAM = Path(__file__).with_name("python_calls.py")
LOOKED_UP = 3  # calls more of PaddleNLP's own linear layers, each of which looks up flags before its product
LINEAR = 7
Q_AND_K, MLP = 17, 5  # calls of Qwen3's two norms more; of an MLP, which a layer of experts has not


@pytest.mark.slow
def test_a_layer_makes_the_calls_that_derived_profiles_price():
    """Those of PaddleNLP's layer, which published runs have; fused kernels make fewer."""
    ran = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    calls = {name: number for name, (number, _) in json.loads(ran.stdout.splitlines()[-1]).items()}
    fused = calls.pop("fused")
    assert fused < calls["plain"] - 10 and all(20 < calls["plain"] <= of <= 120 for of in calls.values()), calls
    again, looked_up = calls["recompute"] - calls["plain"], LINEAR * LOOKED_UP
    priced = LAYER_CALLS, FUSED_CALLS, CHECKPOINT_CALLS
    counted = calls["plain"] + looked_up, fused + looked_up, again
    assert counted == tuple(pytest.approx(one, abs=4) for one in priced)
    experts = calls["experts"] - calls["plain"]
    assert experts == pytest.approx(GROUPED.routing + Q_AND_K - MLP, abs=4)
