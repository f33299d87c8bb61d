"""Prices from the data sheet of an H100 next to times of one H100 80GB under PyTorch 2.11 and CUDA 13."""

from dataclasses import replace

import pytest

from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.model import ModelShape
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, Precision, load_model
from paddlenlp_galvatron.plan.comm_points import Collective
from paddlenlp_galvatron.profiles.analytic import Speed, analytic_computation, analytic_experts
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.network import Network, Place, analytic_hardware

H100 = load_data_sheet("h100")
PEAK = H100.matmul_16bit.value * 1e12
LLAMA2_7B = load_model("llama2-7b")


@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "rows", "tflops"),
    [
        (4096, 14336, 8, 64, 167), (4096, 14336, 8, 512, 706), (4096, 14336, 16, 2048, 657),
        (2048, 768, 64, 64, 138), (2048, 768, 64, 512, 571), (2048, 768, 16, 2048, 642), (7168, 2048, 64, 1024, 695),
    ],
)  # fmt: skip
def test_grouped_products_by_rows_an_expert(hidden, inner, experts, rows, tflops):
    """Three products of one kernel each. Measured without half-filled tiles, of which each expert wastes 64 rows."""
    shape = replace(load_model("qwen3-30b-a3b"), hidden_size=hidden, expert_size=inner, experts=experts)
    forward = analytic_experts(shape, Speed.of(H100, Precision.BF16), Precision.BF16)[1].forward
    product_ms = 6 * hidden * inner / (PEAK * H100.matmul_efficiency.value) * 1e3  # of a row
    full = forward._replace(call_ms=3 * 0.025, expert_ms=0.0, row_ms=product_ms)
    assert forward.expert_ms == pytest.approx(64 * product_ms)
    assert full.of(experts, experts * rows) == pytest.approx(
        experts * rows * 6 * hidden * inner / tflops / 1e9, rel=0.15
    )


@pytest.mark.parametrize(("device", "bus"), [("h100", 480), ("h800", 215)])
def test_all_reduces_of_a_node_by_switches_that_add(device, bus):
    """Bus bandwidth in GB/s, as nccl-tests reports it for 8 ranks. Gathers, and A100, have rings alone."""
    network = Network(analytic_hardware(load_data_sheet(device), 1))
    ms = network.collective_ms(Collective.ALL_REDUCE, Place(8), 8192)
    assert 8192 * 2**20 * 2 * 7 / 8 / ms / 1e6 == pytest.approx(bus, rel=0.03)
    assert network.collective_ms(Collective.ALL_GATHER, Place(8), 8192) > 0.65 * ms
    a100 = Network(analytic_hardware(load_data_sheet("a100"), 1))
    halves = 2 * a100.collective_ms(Collective.ALL_GATHER, Place(8), 8192)
    assert a100.collective_ms(Collective.ALL_REDUCE, Place(8), 8192) == pytest.approx(halves, rel=0.01)


@pytest.mark.parametrize("tp", [2, 8])
def test_without_megatron_sp_a_rank_works_on_whole_tokens_between_split_projections(tp):
    def layer_ms(sequence_parallel: bool, degree: int) -> float:
        profile = analytic_computation(LLAMA2_7B, H100, Precision.BF16, [4096], sequence_parallel=sequence_parallel)
        return ComputeTimes(profile).layer(0, 1, 4096, degree).forward_ms

    assert layer_ms(False, 1) == layer_ms(True, 1)
    hidden_bytes = 2 * LLAMA2_7B.hidden_size * 4096
    more = 2 * 2 * hidden_bytes * (1 - 1 / tp) / (H100.memory_bandwidth.value * H100.memory_efficiency.value * 1e6)
    assert layer_ms(False, tp) - layer_ms(True, tp) == pytest.approx(more, rel=0.02)


def test_collectives_of_tp_that_run_behind_products_cost_nothing():
    shape = ModelShape("small", "llama", 4, 4096, 11008, 32, 32, 32000, 4096)
    assumed = Assumptions(True, Precision.BF16, True, 4096, True, True)
    plan = uniform_plan(layers=4, world_size=4, global_tp_deg=4, vocab_tp=4, global_train_batch_size=8, assumed=assumed)
    shown = H100.tensor_shown
    hidden = H100.model_copy(update={"tensor_shown": shown.model_copy(update={"value": 0.001})})
    alone, behind = (derive(shape, sheet, 1, 4, assumed).predict(plan).time_s for sheet in (H100, hidden))
    assert behind < 0.95 * alone
