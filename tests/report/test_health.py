"""The health line says where a run stands; warnings come when the plan's prediction is off, each once."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from plans import MODEL

from paddlenlp_galvatron.model.shape import flops_per_token
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, Plan, load_model
from paddlenlp_galvatron.profiles.data_sheet import Device
from paddlenlp_galvatron.report.measured import Health

STEP_S = 2.0
STAGES_MIB = (1000.0, 800.0)
RESERVE_MIB = 300.0


def plan(predicted: bool = True, world_size: int = 4, pp: int = 2) -> Plan:
    made = uniform_plan(
        layers=4,
        world_size=world_size,
        global_train_batch_size=8,
        pp_deg=pp,
        chunks=2,
        assumed=Assumptions(seq_length=64),
    )
    stages = [
        {"memory": {"context_mib": RESERVE_MIB}, "memory_mib": mib + RESERVE_MIB}
        for mib in STAGES_MIB[: len(made.stages)]
    ]
    return replace(made, metadata={"predicted": {"time_s": STEP_S, "stages": stages}} if predicted else {})


def records(
    steps: int, step_s: float = STEP_S, peaks_mib: tuple[float, ...] = (1000.0, 1000.0, 800.0, 800.0), start: int = 0
) -> list[dict[str, Any]]:
    return [
        {
            "step": step + 1,
            "loss": 3.0,
            "lr": 1e-3,
            "grad_norm": 0.5,
            "step_time_s": step_s,
            "tokens_per_s": 512 / step_s,
            "peak_memory_mib": list(peaks_mib),
        }
        for step in range(start, start + steps)
    ]


def test_the_line_says_where_the_run_stands():
    line = Health(plan()).line([*records(3, step_s=9.0), *records(30, step_s=2.2, start=3)])
    assert line == (
        "step 33, loss 3.0000, lr 0.001, grad norm 0.5, 58 tokens/s/GPU, 2.2 s (median 2.2 s (predicted 2 s, +10%)), "
        "memory on stage 0 0.9766 GiB (predicted 0.9766 GiB, +0%)"
    )


def test_the_last_step_stands_beside_the_median_and_what_is_left_behind():
    slow = [*records(30, step_s=2.0), *records(1, step_s=5.0, start=30)]
    line = Health(plan(), steps=50_031, on="process").line(slow)
    assert line.startswith("step 31/50031, ") and ", 5 s (median 2 s (" in line and "tokens/s/process" in line
    assert line.endswith(", ETA 1 d 03:46:40")


def test_what_rounds_to_none_has_no_sign_of_less():
    line = Health(plan()).line(records(30, step_s=STEP_S * 0.9999, peaks_mib=(999.9,) * 4))
    assert line.count("+0%)") == 2 and "-0%" not in line


def test_the_line_does_without_a_prediction():
    line = Health(plan(predicted=False, world_size=1, pp=1)).line(records(1, peaks_mib=(20.0,)))
    assert (
        line == "step 1, loss 3.0000, lr 0.001, grad norm 0.5, 256 tokens/s/GPU, 2 s (median 2 s), memory 0.01953 GiB"
    )


def test_mfu_is_the_share_of_the_devices_peak():
    tokens_per_s, tflops = 512 / STEP_S, 1e-5
    device = Device(peak_fp32_tflops=tflops)
    share = tokens_per_s * flops_per_token(MODEL, 64) / (4 * tflops * 1e12)
    assert f"MFU {share:.1%}" in Health(plan(), partial(device.mfu, plan=plan(), shape=MODEL)).line(records(10))
    assert "MFU" not in Health(plan()).line(records(10))


def test_flops_of_a_token_are_those_of_its_matrix_products():
    """Counted by hand: forward 2 a weight and for attention's two products 2 * S * H each; backward twice that."""
    shape, seq_length = load_model("qwen2.5-7b"), 4096
    hidden, kv = shape.hidden_size, shape.kv_heads * shape.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape.intermediate_size
    forward = 2 * (shape.layers * layer + hidden * shape.vocab_size) + shape.layers * 4 * seq_length * hidden
    assert flops_per_token(shape, seq_length) == pytest.approx(3 * forward, rel=1e-4)  # but for norms and biases
    tied = replace(shape, tied_embeddings=True)
    assert flops_per_token(tied, seq_length) == flops_per_token(shape, seq_length)


def test_a_run_as_predicted_is_not_warned_of():
    assert not Health(plan()).warnings(records(40, step_s=STEP_S * 1.14))
    assert not Health(plan(predicted=False)).warnings(records(40, step_s=99.0))


def test_each_warning_is_given_once_and_says_what_to_measure():
    health = Health(plan())
    run = records(40, step_s=STEP_S * 1.2, peaks_mib=(1000.0, 1000.0, 800.0, 1200.0))
    time, memory = health.warnings(run)
    assert "2.4 s (predicted 2 s, +20%)" in time
    assert "galvatron profile computation" in time and "galvatron profile hardware" in time
    assert (
        memory.startswith("stage 1 needs 1.172 GiB (predicted 0.7812 GiB, +50%)")
        and "galvatron profile memory" in memory
    )
    assert not health.warnings(run)
    assert [
        "stage 0" in warning for warning in health.warnings(records(40, peaks_mib=(700.0, 700.0, 800.0, 800.0)))
    ] == [True]


def test_an_imbalance_of_experts_stands_beside_the_one_that_was_planned_for():
    reported = {"searched_from": {"options": {"moe_imbalance": 1.25, "moe_imbalance_bound": 2.0}}}
    run = [record | {"moe_imbalance": 1.5, "moe_imbalance_most": 2.5} for record in records(40)]
    health = Health(replace(plan(), metadata=reported))
    assert "busiest rank of experts 1.5 x mean (predicted 1.25 x mean, +20%)" in health.line(run)
    rows, most = health.warnings(run)
    assert "--moe_imbalance 1.5" in rows and "--moe_imbalance_bound 2.5" in most
    even = [record | {"moe_imbalance": 1.3, "moe_imbalance_most": 1.9} for record in records(40)]
    assert not Health(replace(plan(), metadata=reported)).warnings(even)


def test_one_process_has_no_communication_to_blame():
    (warning,) = Health(plan(world_size=1, pp=1)).warnings(records(40, step_s=1.0, peaks_mib=(1000.0,)))
    assert "galvatron profile computation" in warning and "hardware" not in warning


def test_the_first_steps_of_a_process_and_single_slow_ones_do_not_count():
    health = Health(plan())
    slow = 10 * STEP_S
    assert not health.warnings([*records(5, step_s=slow), *records(9, start=5)])
    resumed = [*records(20), *records(5, step_s=slow, start=20), *records(10, start=25)]
    assert not health.warnings(resumed, start=20)
    assert not health.warnings([*records(30), *records(9, step_s=slow, start=30)])  # a checkpoint, a neighbour
    assert health.warnings([*records(30), *records(11, step_s=slow, start=30)])
