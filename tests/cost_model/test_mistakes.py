"""Mistakes of existing cost models, one test each: every one fails on a model that makes the mistake."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from cost_examples import COMPUTATION, HARDWARE, MODEL, SEQ, cost, example, example_plan, one_node

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import CostOptions, StageSetting
from paddlenlp_galvatron.cost_model.traffic import step_traffic_bytes
from paddlenlp_galvatron.cost_model.weights import weights_of
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Precision, VocabStrategy, read_plan, write_plan
from paddlenlp_galvatron.profiles import ComputationProfile, HardwareProfile, Shape
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes, TimeMode
from paddlenlp_galvatron.profiles.hardware import Collective
from paddlenlp_galvatron.profiles.network import Network, Place

DDP, ZERO2, ZERO3 = DataParallel
MATRICES = weights_of(MODEL.block, 1).matrices
TOKENS_MIB = 16 * SEQ * MODEL.hidden_size * 2 / 2**20  # one micro-batch of 16 samples in bf16: 16 MiB


def test_1_a_batch_that_does_not_split_is_refused_not_rounded_down():
    with pytest.raises(UserError, match="12 samples of a micro-batch do not split over the dp degree 8"):
        cost(one_node(), LayerStrategy(), micro_batch=12)
    with pytest.raises(UserError, match="dp degree 4"):
        one_node().vocab_cost(VocabStrategy(2), StageSetting(8, 6, 1, 1), "only")


def test_2_a_switch_costs_what_its_bytes_take_in_both_directions_and_is_in_the_step_time():
    model = one_node(sequence_parallel=False)
    split, whole = LayerStrategy(), LayerStrategy(degree=4)
    forward, backward = model.switch_cost(split, whole, StageSetting(8, 16, 1, 1))
    # Each rank gathers the 2 of 8 slices' dp share: 16 MiB / 2 groups of 4; 0.05 ms and 0.01 ms a MiB.
    assert forward == pytest.approx(0.05 + 0.01 * TOKENS_MIB / 2)
    assert backward == 0  # every rank has its slice of the gradient already
    assert model.switch_cost(whole, split, StageSetting(8, 16, 1, 1)) == (0, pytest.approx(forward))

    plan = example_plan(model, layers=(split, whole, split, whole))
    parts = model.stage_parts(plan, 0)
    stage = model.predict(plan).stages[0]
    assert stage.passes_ms.forward == pytest.approx(sum(p.passes_ms.forward for p in parts) + 2 * forward)
    assert stage.passes_ms.backward == pytest.approx(sum(p.passes_ms.backward for p in parts) + 2 * forward)


def test_2_layers_with_sharded_tokens_hand_on_for_nothing():
    model = one_node()
    for before in (LayerStrategy(), LayerStrategy(2), LayerStrategy(8, ulysses=True), VocabStrategy(4), None):
        for after in (LayerStrategy(4), LayerStrategy(2, ulysses=True), None):
            assert model.switch_cost(before, after, StageSetting(8, 16, 1, 1)) == (0, 0)


def test_5_ulysses_shards_and_sums_over_all_its_ranks_without_any_dp():
    model = one_node()
    ulysses = {z: cost(model, LayerStrategy(8, ulysses=True, dp_type=z), micro_batches=1) for z in DataParallel}
    dp = {z: cost(model, LayerStrategy(1, dp_type=z), micro_batches=1) for z in DataParallel}
    for z in DataParallel:
        assert ulysses[z].sync_ms == pytest.approx(dp[z].sync_ms)
        assert ulysses[z].states_mib == pytest.approx(dp[z].states_mib)
    assert ulysses[ZERO3].states_mib == pytest.approx(ulysses[DDP].states_mib / 8, rel=0.01)  # norms stay whole


def test_6_zero3_gathers_twice_a_micro_batch():
    plan = example_plan(one_node(), layers=(LayerStrategy(dp_type=ZERO3),) * 4, micro_batches=2)
    gathered = step_traffic_bytes(plan, MODEL)["all_gather"]
    assert gathered == 8 * 4 * 2 * 2 * MATRICES * 2  # ranks, layers, micro-batches, passes, bf16
    serial = replace(one_node().profiles.network.profile, overlap_coe=2.0)  # nothing gained by running side by side
    model = one_node(hardware=serial)
    gather_ms = 0.05 + 0.01 * MATRICES * 2 / 2**20
    plain, sharded = cost(model, LayerStrategy()), cost(model, LayerStrategy(dp_type=ZERO3))
    assert sharded.passes_ms.forward - plain.passes_ms.forward == pytest.approx(gather_ms)
    assert sharded.passes_ms.backward - plain.passes_ms.backward == pytest.approx(gather_ms)


def test_6_each_rank_hands_on_its_own_slice_to_the_next_stage():
    model = one_node(hardware=replace(one_node().profiles.network.profile, messages_ms={}))
    for pipeline, ranks in ((2, 4), (4, 2), (8, 1)):
        hop = model.boundary_cost(StageSetting(ranks, 16, 1, pipeline))
        assert hop == pytest.approx(TOKENS_MIB / ranks / 50)
    plan = example_plan(model, stages=(2, 2), layers=(LayerStrategy(4),) * 4)
    assert step_traffic_bytes(plan, MODEL)["p2p"] == 2 * 2 * TOKENS_MIB * 2**20  # ways, micro-batches


def test_6_recompute_needs_room_for_one_whole_layer():
    model = one_node(options=CostOptions(global_memory_buffer=False))
    plain, again = (cost(model, LayerStrategy(recompute=flag)) for flag in (False, True))
    assert again.workspace.total_mib - plain.workspace.total_mib == pytest.approx(plain.activation_mib)
    assert again.activation_mib == pytest.approx(2 * 1.0)  # two samples' layer inputs
    assert plain.activation_mib == pytest.approx(2 * 40)


def test_6_fp32_messages_and_buffers_are_twice_those_of_bf16():
    def buffer_mib(precision: Precision) -> float:
        strategy = LayerStrategy(4)
        on, off = (
            cost(one_node(mixed_precision=precision, options=CostOptions(global_memory_buffer=flag)), strategy)
            for flag in (True, False)
        )
        return on.workspace.total_mib - off.workspace.total_mib

    assert buffer_mib(Precision.BF16) == pytest.approx(8 * SEQ * MODEL.hidden_size * 2 / 2**20)
    assert buffer_mib(Precision.FP32) == pytest.approx(2 * buffer_mib(Precision.BF16))


@pytest.mark.parametrize("mode", TimeMode)
def test_7_each_measured_batch_is_priced_as_measured_in_any_order_of_the_file(mode):
    points = {Shape(8, SEQ): 0.42, Shape(1, SEQ): 0.9, Shape(4, SEQ): 0.5, Shape(1, 10 * SEQ): 99.0}
    times = ComputeTimes(replace(COMPUTATION, layer_ms={0: points}), mode)
    for (batch, seq), ms in points.items():
        if seq == SEQ:
            assert times.layer(0, batch, SEQ).forward_ms == pytest.approx(batch * ms)
    assert times.layer(0, 6, SEQ).forward_ms == pytest.approx((8 * 0.42 + 4 * 0.5) / 2)  # between the neighbours


def test_7_a_sequence_length_is_not_found_inside_a_longer_number(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"layertype_0_bsz1_seq20480": 50.0}))
    times = ComputeTimes(ComputationProfile.load(path, "bf16", 1024, 16))
    with pytest.raises(UserError, match=r"sequence length 2048 was not measured \(the profile has 20480"):
        times.layer(0, 1, 2048)


def test_9_the_vocabularys_zero3_survives_the_file_and_frees_memory(tmp_path):
    model = one_node()
    plans = {z: example_plan(model, vocab=VocabStrategy(2, dp_type=z)) for z in (DDP, ZERO3)}
    predicted = {z: model.predict(plan) for z, plan in plans.items()}
    saved = predicted[DDP].stages[0].memory.states_mib - predicted[ZERO3].stages[0].memory.states_mib
    whole = 2 * MODEL.vocab_size * MODEL.hidden_size / 2 * (2 + 4 + 8) / 2**20  # weights, master weights, moments
    assert saved == pytest.approx(whole * 3 / 4)  # four ranks share each half; gradients stay whole
    write_plan(plans[ZERO3], tmp_path / "plan.json")
    assert model.predict(read_plan(tmp_path / "plan.json")) == predicted[ZERO3]


def test_10_a_missing_measurement_is_an_error_with_a_name_and_threads_agree():
    times = ComputeTimes(replace(COMPUTATION, layer_ms={1: {Shape(1, SEQ): 1.0}}))
    with pytest.raises(UserError, match="layertype_0: no time in the computation profile"):
        times.layer(0, 1, SEQ)
    model = one_node()
    plans = [
        example_plan(model, layers=(LayerStrategy(degree, dp_type=z),) * 4, micro_batches=m)
        for degree in (1, 2, 4, 8)
        for z in DataParallel
        for m in (1, 2, 4)
    ]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(model.predict, plans * 2))
    fresh = one_node()
    assert together == [fresh.predict(plan) for plan in plans * 2]


def test_11_a_strided_group_across_nodes_is_priced_across_nodes():
    network = Network(HARDWARE)
    assert network.measured_place(4, consecutive=False) == Place(4, nodes=2, consecutive=False)
    # tp 4 fills a node; its dp groups (0, 4), (1, 5), ... cross, four at once over a link of 10 MiB/ms.
    crossing = cost(example(), LayerStrategy(4), micro_batches=1)
    fast = HardwareProfile(1, 8, {(8, True): 100}, overlap_coe=HARDWARE.overlap_coe)
    inside = cost(one_node(hardware=fast), LayerStrategy(4), micro_batches=1)
    assert crossing.sync_ms > 20 * inside.sync_ms
    assert network.collective_ms(Collective.ALL_REDUCE, Place(2, 2, False), 100) == pytest.approx(100 / 2.5)
    assert network.collective_ms(Collective.ALL_REDUCE, Place(2, 1, False), 100) == pytest.approx(100 / 100)
    # The same degree of dp next to tp 1: pairs of neighbours inside a node do not pay for the link.
    assert cost(example(), LayerStrategy(2), micro_batches=1).passes_ms.forward < crossing.passes_ms.forward
