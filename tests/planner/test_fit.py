"""Rows of `fit`: least GPUs, bound within the GPU, tasks that take less or more."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import CostModel, CostOptions, StageSetting, Task
from paddlenlp_galvatron.cost_model.costs import Profiles
from paddlenlp_galvatron.cost_model.layers import adapter_share, product_share
from paddlenlp_galvatron.options.prices import JobOptions
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Precision, load_model
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.planner.fit import Fit, FitOptions, fit
from paddlenlp_galvatron.planner.options import SearchOptions, TaskOptions
from paddlenlp_galvatron.planner.whole_run import Job
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_memory
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network, analytic_hardware

SHEET = load_data_sheet("h100")
SHAPE = load_model("llama2-7b")
SEQ = 2048


def fitted(**values: Any) -> list[Fit]:
    options = FitOptions.from_mapping({"model_size": "llama2-7b", "seq_length": SEQ, "batch": 64} | values)
    return list(fit(SHAPE, options.of(SHAPE)))


def priced(task: Task) -> CostModel:
    profiles = Profiles.of(
        Network(analytic_hardware(SHEET, 1)),
        ComputeTimes(analytic_computation(SHAPE, SHEET, Precision.BF16, [SEQ])),
        MemoryUse(analytic_memory(SHAPE, Precision.BF16, [SEQ])),
    )
    return CostModel(SHAPE, profiles, Assumptions(True, Precision.BF16, seq_length=SEQ), CostOptions(task=task))


STAGE = StageSetting(8, 8, 4, 1)
LAYER = LayerStrategy()


def test_rows_begin_at_the_least_number_that_fits_and_are_within_the_bound():
    found = fitted()
    assert [row.best is not None for row in found] == [False, True, True, True, True] or all(row.best for row in found)
    for row in found:
        assert row.tensors_mib < row.bound_mib
        assert (row.best is not None) == (row.bound_mib <= row.gpu_gib * 1024 * (1 + 1e-9)), row.gpus
    speeds = [row.best.samples_per_s for row in found if row.best]
    assert speeds == sorted(speeds) and len(speeds) > 2
    assert all(row.with_more >= row.best.samples_per_s for row in found if row.best and row.with_more)


def test_a_number_below_the_least_does_not_fit():
    least = next(row.gpus for row in fitted() if row.best)
    (below,) = fitted(gpus=least // 2)
    assert below.best is None and below.held and below.bound_mib > below.gpu_gib * 1024


def test_adapters_need_fewer_cards_than_all_weights_and_a_reference_is_a_table():
    (alone,) = fitted(gpus=1, task="lora")
    (pairs,), (without,) = fitted(gpus=1, task="dpo", lora_rank=8), fitted(gpus=1)
    assert alone.best and pairs.best and not without.best
    assert pairs.best.samples_per_s == alone.best.samples_per_s
    dpo, pretrain = (fitted(gpus=8, task=task)[0].best for task in ("dpo", "pretrain"))
    assert dpo and pretrain and dpo.samples_per_s == pretrain.samples_per_s


def test_every_option_of_the_task_reaches_the_search():
    task = {
        "task": "lora",
        "lora_rank": 4,
        "document_tokens": 512.0,
        "offload_optimizer": True,
        "offload_activations": True,
    }
    experts = {"moe_imbalance": 1.9, "moe_imbalance_bound": 3.0, "experts_one_by_one": True}
    assert {*task, *experts} == {*TaskOptions.model_fields}
    [row] = fitted(gpus=8, **task, **experts)
    asked = {name: getattr(row.question.options, name) for name in TaskOptions.model_fields}
    assert asked == {**task, **experts}
    priced = row.question.cost.options
    assert replace(priced, context_mib=0.0, freed=None) == row.question.options.cost_options


@pytest.mark.parametrize(("nodes", "gpus"), [(1, (4, 8)), (2, (4, 8, 32))])
def test_profiles_of_one_cluster_price_other_numbers_of_gpus(nodes, gpus, tmp_path):
    computation = analytic_computation(SHAPE, SHEET, Precision.BF16, [SEQ])
    for profile in (analytic_hardware(SHEET, nodes), computation, analytic_memory(SHAPE, Precision.BF16, [SEQ])):
        profile.save(tmp_path)
    rows, derived = fitted(gpus=gpus, profiles=tmp_path), fitted(gpus=gpus)
    assert tuple(row.best and row.best.plan.world_size for row in rows) == gpus
    assert [row.best.time_s for row in rows] == pytest.approx([row.best.time_s for row in derived], rel=0.2)
    if nodes == 1:
        assert max(row.gpus for row in fitted(profiles=tmp_path)) == 8
        with pytest.raises(UserError, match="no all-reduce across nodes was measured"):
            fitted(gpus=16, profiles=tmp_path)


def test_frozen_weights_take_their_bytes_alone_and_half_of_backwards_products():
    all_weights, frozen = (priced(task).layer_cost(LAYER, STAGE) for task in (Task(), Task(adapter_rank=1)))
    weights_mib = SHAPE.layer_parameters / 2**20
    assert all_weights.states_mib == pytest.approx(16 * weights_mib, rel=1e-3)
    assert frozen.states_mib == pytest.approx(2 * weights_mib, rel=5e-3)  # adapters of rank 1: 16 bytes of 0.04 %
    assert frozen.sync_ms < all_weights.sync_ms / 50
    adapters_ms = frozen.passes_ms.forward - all_weights.passes_ms.forward
    assert 0.1 < adapters_ms / all_weights.passes_ms.forward < 0.25  # few operations, bound by memory
    products_ms = product_share(SHAPE, SEQ) * all_weights.passes_ms.forward
    assert frozen.passes_ms.backward == pytest.approx(
        all_weights.passes_ms.backward - products_ms + 2 * adapters_ms, rel=0.01
    )
    wider = priced(Task(adapter_rank=1024)).layer_cost(LAYER, STAGE)
    assert all(more > less for more, less in zip(wider.passes_ms, frozen.passes_ms, strict=True))
    for name in ("sync_ms", "states_mib", "activation_mib"):
        assert getattr(wider, name) > getattr(frozen, name), name


def test_attention_of_packed_rows_ends_with_documents():
    whole, packed, tiny = (priced(Task(document_tokens=each)).layer_cost(LAYER, STAGE) for each in (None, SEQ, 1))
    assert packed == whole
    products = product_share(SHAPE, SEQ)
    assert tiny.passes_ms.forward == pytest.approx(products * whole.passes_ms.forward, rel=0.01)
    assert tiny.passes_ms.backward == pytest.approx(products * whole.passes_ms.backward, rel=0.01)
    for name in ("states_mib", "activation_mib", "sync_ms"):
        assert getattr(tiny, name) == getattr(whole, name), name


def test_products_with_adapters_are_bound_by_memory_in_16_bits():
    share, bf16, fp32 = partial(adapter_share, SHAPE.block), NumberTypes.of(Precision.BF16), NumberTypes.of()
    assert share(1, 8, bf16) == share(1, 64, bf16) > 8 * share(1, 8, fp32)
    assert share(1, 2048, bf16) > share(1, 8, bf16)
    assert share(2, 8, fp32) > share(1, 8, fp32)  # one factor of each is whole on both ranks


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"gpus": "8,12"}, "12 are no whole number of nodes of 8"),
        ({"gpus": ""}, "gpus"),
        ({"gpus": 0}, "gpus"),
        ({"task": "rlhf"}, "task"),
        ({"lora_rank": 8}, "pretrain trains all weights"),
        ({"seq_length": 10**6}, "beyond the 4096 positions"),
        ({"tokens": "inf"}, "tokens"),
        ({"profiles": "missing"}, "holds no allreduce_bandwidth"),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(values, reported):
    with pytest.raises(UserError) as error:
        fitted(**values)
    assert reported in str(error.value) and len(error.value.faults) == 1


def test_a_thousand_cards_are_answered():
    shape = load_model("llama3-405b")
    options = FitOptions.from_mapping({"model_size": "llama3-405b", "gpus": "512,1024"})
    rows = list(fit(shape, options.of(shape)))
    assert all(row.best and row.bound_mib <= row.gpu_gib * 1024 * (1 + 1e-9) for row in rows)


def test_several_devices_stand_in_one_answer_each_with_its_own_memory():
    found = fitted(device="h100,a100-40gb", gpus="4,8")
    assert [(row.device.name, row.gpus, row.gpu_gib) for row in found] == [
        *(("NVIDIA H100-SXM5-80GB", gpus, 79.1) for gpus in (4, 8)),
        *(("NVIDIA A100-SXM4-40GB", gpus, 39.4) for gpus in (4, 8)),
    ]
    for row in found:
        [alone] = fitted(device=row.device.name if row.gpu_gib < 79 else "h100", gpus=row.gpus)
        assert alone.best and row.best and alone.best.time_s == row.best.time_s
    with pytest.raises(UserError, match="profiles say which one it is"):
        fitted(device="h100,h20", profiles="somewhere")


def test_a_training_takes_days_money_and_room_for_its_checkpoints():
    options = JobOptions.from_values(
        {"tokens": 1e9, "num_train_epochs": 3, "price_per_gpu_hour": 2, "save_gb_per_s": 4}
    )
    job = Job.of(options, SHAPE, Task(), SearchOptions(), 1e5)
    assert job.days == pytest.approx(3e9 / 1e5 / 86400) and job.cost == pytest.approx(2 * 8 * 24 * job.days)
    assert job.checkpoint_gb == pytest.approx(12 * SHAPE.parameters / 1e9)  # fp32 weights and two moments
    assert job.save_s == pytest.approx(job.checkpoint_gb / 4)
    unsaid = Job.of(JobOptions(), SHAPE, Task(adapter_rank=8), SearchOptions(), 1e5)
    hidden, mlp = SHAPE.hidden_size, SHAPE.intermediate_size
    learnt = SHAPE.layers * 8 * (4 * 2 * hidden + 3 * (hidden + mlp))
    assert unsaid == Job(None, None, pytest.approx(12 * learnt / 1e9), None)
