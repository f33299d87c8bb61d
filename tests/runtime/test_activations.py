"""The device keeps few layers' activations at once, however many layers are offloaded."""

import gc
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.base.units import MIB
from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.cost_model.weights import offloaded_mib
from paddlenlp_galvatron.plan import LayerStrategy, Recompute, with_defaults
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup

from ..distributed.plans import plan


def peak_mib(layers: int, layer: LayerStrategy) -> tuple[float, float]:
    """The peak of a step's passes without page-locked memory, and what a layer keeps."""
    case = small_case(replace(plan(1, "1 " * layers), layers=(layer,) * layers), "qwen2")
    gc.collect()
    before = device.allocated_mib()
    engine: Any = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length))
    for step in range(2):
        device.reset_peak()
        engine.forward_backward(batch_of(case, step))
        window = engine.stage.window
        most = device.peak_mib() - before - window.host_mib
    counted = replace(case.plan, assumed=replace(case.plan.assumed, seq_length=case.seq_length))
    assert window.host_mib <= offloaded_mib(with_defaults(counted, on_gpus=False), case.shape, 0)
    return most, next(iter(window._bytes.values()), 0) / MIB


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("percent", [100, 60])
def test_a_further_layer_takes_that_much_less_of_the_device(recompute: Recompute, percent: int) -> None:
    layers = (LayerStrategy(recompute=recompute, offload=part) for part in (0, percent))
    (plain, plain_8), (away, away_8) = ([peak_mib(count, layer) for count in (4, 8)] for layer in layers)
    saved_mib = (plain_8[0] - plain[0]) - (away_8[0] - away[0])
    assert away[1] > 0 and saved_mib == pytest.approx(4 * percent / 100 * away[1], rel=0.01)
