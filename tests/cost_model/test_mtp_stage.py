"""The last stage with an MTP layer against a simulation of its events: their work, and memory kept until backward."""

from itertools import accumulate

import pytest
from cost_model.test_simulate import longest_path_ms

from paddlenlp_galvatron.base import MIB
from paddlenlp_galvatron.cost_model import CostOptions, StageTimes, derive
from paddlenlp_galvatron.cost_model.module import StageSetting
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Precision, Schedule, VocabStrategy, load_model
from paddlenlp_galvatron.plan.schedule import ByKind, order
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

TP, STAGES, SEQ, MICRO_BATCHES, SAMPLES = 4, 4, 4096, 16, 2
STATE_BYTES = 16  # of a weight in bf16: weight, gradient, fp32 copy and two moments


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("megatron_sp", [True, False], ids=["Megatron-SP", "whole tokens"])
def test_work_and_memory_of_the_last_stage_are_those_of_its_events(schedule, megatron_sp):
    model, sheet = load_model("glm-4.5-air").having(8, 1), load_data_sheet("h100-80gb")
    assumed = Assumptions(seq_length=SEQ, mixed_precision=Precision.BF16, sequence_parallel=megatron_sp)
    models = model.having(8, 0), model
    plain, cost = (derive(each, sheet, 2, 8, assumed, CostOptions()) for each in models)
    plain_plan, plan = (
        Plan(
            world_size=TP * STAGES,
            global_batch=SAMPLES * MICRO_BATCHES,
            micro_batches=MICRO_BATCHES,
            stages=(2, 2, 2, 2 + mtp),
            layers=(LayerStrategy(degree=TP),) * (8 + mtp),
            vocab=VocabStrategy(degree=TP),
            schedule=schedule,
            assumed=assumed,
        )
        for mtp in (0, 1)
    )
    before, predicted = plain.predict(plain_plan), cost.predict(plan)
    setting = StageSetting.of(plain_plan)
    layer = plain.layer_cost(LayerStrategy(degree=TP), setting, plain.layer_types[-1])
    lookup, head = (plain.vocab_cost(plan.vocab, setting, role) for role in ("first", "last"))

    # DeepSeek-V3, section 2.2: two norms, the projection of both halves, a layer, a norm, and the head once more.
    hidden, tokens = model.hidden_size, SAMPLES * SEQ // (TP if megatron_sp else 1)
    flops = sheet.matmul_16bit.value * sheet.matmul_efficiency.value * 1e9  # a ms
    product_ms = 2 * (2 * hidden * hidden) * tokens / flops
    kept_mib = (
        5 * hidden * tokens * Precision.BF16.bytes / MIB
    )  # both norms' inputs, both halves, the last norm's input
    projection = ByKind(product_ms, 2 * product_ms), kept_mib
    again = [(part.passes_ms, part.activation_mib) for part in (layer, head)]
    extra = [(lookup.passes_ms, 0.0), projection, *again]

    forward, backward = (
        [*before.times.passes.of(kind)[:-1], before.times.passes.of(kind)[-1] + sum(ms.of(kind) for ms, _ in extra)]
        for kind in ("forward", "backward")
    )
    assert predicted.times.passes.forward[-1] == pytest.approx(forward[-1], rel=0.05)
    assert predicted.times.passes.backward[-1] == pytest.approx(backward[-1], rel=0.05)
    times = StageTimes(ByKind(forward, backward), predicted.times.sync, predicted.times.send)
    step_ms = longest_path_ms(schedule, times, MICRO_BATCHES)
    assert predicted.time_s * 1e3 == pytest.approx(step_ms, rel=0.03)

    of_a_pass = layer.activation_mib * 2 + head.activation_mib + sum(mib for _, mib in extra)
    passes = order(schedule, STAGES - 1, STAGES, MICRO_BATCHES, 1)
    walked = accumulate(of_a_pass if work.kind == "forward" else -of_a_pass for work in passes)
    assert predicted.stages[-1].memory.activations_mib == pytest.approx(max(walked), rel=1e-3)
    table = model.vocab_size * hidden // TP
    weights = layer.terms.states.parameters_mib * MIB / Precision.BF16.bytes + 2 * hidden * hidden + table
    more_mib = predicted.stages[-1].memory.states_mib - before.stages[-1].memory.states_mib
    assert more_mib == pytest.approx(weights * STATE_BYTES / MIB, rel=2e-3)
