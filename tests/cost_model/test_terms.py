"""Single terms of the cost model against arithmetic, laws that hold for any numbers, and layers of several types."""

from dataclasses import replace

import pytest
from cost_examples import MEMORY, MODEL, NARROW, SEQ, WIDE, cost, example, example_plan, one_node, two_types
from hypothesis import given
from hypothesis import strategies as st
from plans import MODEL as SMALL
from plans import plan, valid_plans

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import CostModel, CostOptions, StageSetting
from paddlenlp_galvatron.cost_model.collectives import CallTimes, Overlapped, Setting, place_of
from paddlenlp_galvatron.cost_model.layers import products_behind
from paddlenlp_galvatron.cost_model.module import Room, module_memory
from paddlenlp_galvatron.cost_model.weights import StateBytes, Weights, held_mib, weights_of
from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.plan import (
    Assumptions,
    DataParallel,
    LayerStrategy,
    Plan,
    Precision,
    Schedule,
    VocabStrategy,
    load_model,
)
from paddlenlp_galvatron.plan.comm_points import CommPoint
from paddlenlp_galvatron.plan.layout import TokenLayout, moves, redistribution, token_layout
from paddlenlp_galvatron.plan.mesh import SHARDING, Axis, Mesh
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.profiles import Collective, CommPointKey, CommPointTimes
from paddlenlp_galvatron.profiles.data_sheet import Device
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Place

DDP, ZERO2, ZERO3 = DataParallel


def test_a_rank_holds_the_adapters_of_its_experts():
    shape, count = load_model("qwen3-30b-a3b"), 48 * 128 * 3
    layers = (LayerStrategy(ep=4, etp=2),) * 48
    made = Plan(8, 8, 1, (48,), layers, assumed=Assumptions(seq_length=64, mixed_precision=Precision.BF16))
    _, states = held_mib(made, shape, 0, Adapters(8, 16))
    experts, attention = count * 2048 * 768, 48 * 8 * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)
    factors = count * 8 * (2048 + 768 / 2) / 4  # etp splits one of them
    assert states * 2**20 == 2 * (shape.parameters - experts + experts / 8) + 16 * (attention + factors)


MATRICES = weights_of(MODEL.block, 1).matrices


@pytest.mark.parametrize(
    ("precision", "fp32_gradients", "dp_type", "whole", "expected"),
    [
        (Precision.FP32, False, DDP, True, 4 + 4 + 8),
        (Precision.BF16, False, DDP, True, 2 + 2 + 4 + 8),
        (Precision.BF16, True, DDP, True, 2 + 4 + 4 + 8),
        (Precision.FP16, False, DDP, True, 2 + 2 + 4 + 8),
        (Precision.BF16, False, ZERO2, True, 2 + 2 + 12 / 4),
        (Precision.BF16, False, ZERO2, False, 2 + 2 / 4 + 12 / 4),
        (Precision.BF16, False, ZERO3, True, 2 / 4 + 2 + 12 / 4),
        (Precision.BF16, False, ZERO3, False, 16 / 4),
        (Precision.FP32, False, ZERO2, False, 4 + 4 / 4 + 8 / 4),
        (Precision.FP32, False, ZERO3, False, 16 / 4),
    ],
)
def test_bytes_that_adamw_keeps_a_parameter(precision, fp32_gradients, dp_type, whole, expected):
    assert StateBytes.of(NumberTypes.of(precision, fp32_gradients)).held(dp_type, 4, whole) == expected


def test_weights_of_a_rank_add_up_to_the_layers():
    gqa = replace(MODEL, family="qwen2", heads=16, kv_heads=4)
    assert weights_of(gqa.block, 1).all == gqa.layer_parameters
    for tp in (2, 4):
        local = weights_of(gqa.block, tp)
        assert tp * (local.matrices + local.split_vectors) + local.whole_vectors == gqa.layer_parameters
        assert local.copies == 1
    # Beyond the kv heads two ranks keep the same whole kv head, with its bias.
    eight, four, head = weights_of(gqa.block, 8), weights_of(gqa.block, 4), gqa.head_dim
    assert 8 * eight.matrices - 4 * four.matrices == 4 * 2 * head * gqa.hidden_size
    assert 8 * eight.split_vectors - 4 * four.split_vectors == 4 * 2 * head
    assert (eight.copies, eight.copied_vectors) == (2, (head, head))
    assert eight.copied_matrices == (head * gqa.hidden_size,) * 2


def test_what_ranks_compute_at_the_points_of_a_shared_layer_is_paid_for_again_in_a_recompute():
    stage = StageSetting(4, 4, 1, 1)
    plain = example()
    points = {
        CommPointKey("layertype_0", 1, SEQ, axis): CommPointTimes(*ms)
        for axis, ms in ((Axis.ULYSSES, (1.0, 2.0)), (Axis.CONTEXT, (0.25, 0.5)))
    }
    with_points = example(computation=replace(plain.profiles.times.profile, points=points))

    def added(strategy: LayerStrategy) -> list[float]:
        less, more = (model.layer_cost(strategy, stage).terms.passes for model in (plain, with_points))
        again = more.backward.recompute_ms - less.backward.recompute_ms
        return [*(slow.compute_ms - fast.compute_ms for slow, fast in zip(more, less, strict=True)), again]

    assert added(LayerStrategy(2)) == [0, 0, 0]
    assert added(LayerStrategy(2, ulysses=True)) == pytest.approx([1, 2, 0])
    assert added(LayerStrategy(2, ulysses=True, context=2, recompute=True)) == pytest.approx([1.25, 2.5, 1.25])


def test_a_vocabulary_that_does_not_split_is_padded():
    assert weights_of(replace(MODEL, vocab_size=32001).embedding, 4).matrices == 8001 * MODEL.hidden_size


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_redistribution_moves_what_the_layout_room_says(size, per_rank, data):
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    degrees = st.sampled_from([(d, c) for d in divisors for c in divisors if size % (d * c) == 0])
    flags = st.tuples(*[st.booleans()] * 2)

    def drawn() -> TokenLayout:
        degree, context = data.draw(degrees)
        strategy = LayerStrategy(degree, *data.draw(flags), context=context)
        return token_layout(strategy, size, data.draw(st.booleans()))

    source, target = drawn(), drawn()
    samples = per_rank * size
    tokens = samples * 2 * size
    received = [0] * size
    moved = moves(source.intervals(tokens, samples), target.intervals(tokens, samples))
    for move in moved:
        if move.source != move.target:
            received[move.target] += move.stop - move.start
    change = redistribution(source, target, tokens, samples)
    assert (change.most_tokens, change.all_tokens) == (max(received), sum(received))
    crossing = [m for m in moved if m.source // change.span != m.target // change.span]
    assert not crossing


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.data())
def test_a_groups_place_is_its_worst_in_any_stage(size, pipeline, node, consecutive, data):
    degree = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    mesh = Mesh.of(size, (Axis.TENSOR, degree), consecutive=consecutive)
    for axes in ((Axis.TENSOR,), SHARDING):
        members = mesh.groups(*axes).tolist()
        spans = {
            len({(stage * size + rank) // node for rank in ranks}) for stage in range(pipeline) for ranks in members
        }
        place = place_of(axes, mesh, node, pipeline)
        assert (place.size, place.nodes) == (len(members[0]), max(spans))


def test_all_ranks_of_a_stage_share_the_weights_of_ulysses():
    assert place_of(SHARDING, Mesh.of(8, (Axis.ULYSSES, 4)), 4, 1) == Place(8, 2, True)
    assert place_of(SHARDING, Mesh.of(8, (Axis.TENSOR, 4)), 4, 1) == Place(2, 2, False)


def test_megatron_sp_pays_ten_collectives_of_which_products_hide_four():
    model = one_node()
    # tp 2 on 8 ranks: 4 samples of a micro-batch of 16, 4 MiB.
    one = 0.05 + 0.01 * 4 * SEQ * MODEL.hidden_size * 2 / 2**20
    compute = 0.1 + 0.4 * 2  # 4 samples shared by 2 ranks
    plain, again = (cost(model, LayerStrategy(2, recompute=flag)) for flag in (False, True))
    assert plain.passes_ms.forward == pytest.approx(compute + 4 * one)
    # Gathers for products, and sums of their input's gradients, each 0.2 of whose time products show.
    assert plain.passes_ms.backward == pytest.approx(2 * compute + (2 + 4 * 0.2) * one)
    assert plain.terms.tensor_hidden_ms == pytest.approx(4 * 0.8 * one)
    # Recompute makes forward's four, and these gathers are the ones that products need.
    assert again.passes_ms.backward == pytest.approx(3 * compute + (2 + 4 + 2 * 0.2) * one)


def test_what_products_cannot_hide_is_paid_for():
    """Each message by itself: those of attention are no shorter for the longer products of the MLP."""
    points = CommPoint.INTO_ATTENTION, CommPoint.INTO_MLP
    timed = CallTimes(backward_ms=3, beside=tuple((point, Overlapped(5, 5 * 1.2)) for point in points))
    behind = timed.behind(dict(zip(points, (1, 20), strict=True)))
    assert behind.backward_ms == pytest.approx(3 + (5 + 0.2 * 1 - 1) + 0.2 * 5)
    assert behind.hidden_ms == pytest.approx(2 * 5 - (behind.backward_ms - 3))
    shares = products_behind(MODEL, SEQ)
    assert 0 < shares[points[0]] < shares[points[1]] < sum(shares.values()) < 1


def test_software_that_keeps_what_it_gathers_pays_in_memory_and_scatters_in_the_way():
    """For published runs."""
    again, kept = (one_node(options=CostOptions(keeps_gathered=keeps)) for keeps in (False, True))
    before, after = (cost(model, LayerStrategy(2)) for model in (again, kept))
    tokens_mib = 4 * SEQ * MODEL.hidden_size * 2 / 2**20
    assert after.activation_mib - before.activation_mib == pytest.approx(2 * tokens_mib / 2)  # of the other rank
    assert (
        after.terms.passes.backward.tensor_ms == after.terms.passes.forward.tensor_ms
        and after.terms.tensor_hidden_ms == 0
    )
    alone = [cost(model, LayerStrategy(recompute=flag)) for model in (again, kept) for flag in (False, True)]
    assert alone[:2] == alone[2:]


def test_plain_tp_pays_two_all_reduces_a_pass():
    model = one_node(sequence_parallel=False)
    one = 0.05 + 0.01 * 4 * SEQ * MODEL.hidden_size * 2 / 2**20
    plain, again = (cost(model, LayerStrategy(2, recompute=flag)) for flag in (False, True))
    assert plain.passes_ms.forward == pytest.approx(0.9 + 2 * one)
    assert again.passes_ms.backward == pytest.approx(3 * 0.9 + 4 * one)
    assert plain.activation_mib == pytest.approx(4 * 25)  # a quarter of it whole on both ranks


def test_ulysses_pays_four_exchanges_of_a_ranks_own_tokens():
    own = 2 * SEQ * MODEL.hidden_size * 2 / 2**20  # 16 samples over 8 ranks, MiB of hidden states
    q_and_o, k_and_v = 0.05 + 0.01 * own, 0.05 + 0.01 * own / 2  # half as many kv heads
    plain, again = (cost(one_node(), LayerStrategy(4, True, recompute=flag)) for flag in (False, True))
    compute = 0.1 + 0.4 * 2
    assert plain.passes_ms.forward == pytest.approx(compute + 2 * q_and_o + 2 * k_and_v)
    assert again.passes_ms.backward == pytest.approx(3 * compute + 4 * q_and_o + 4 * k_and_v)
    assert plain.activation_mib == pytest.approx(2 * 40)


def test_gradients_hide_behind_backward_and_slow_it_by_the_overlap_coefficient():
    compute, message = 2 * (0.1 + 0.4 * 2), 0.05 + 0.01 * MATRICES * 2 / 2**20
    vectors = 0.01 * 2 * MODEL.hidden_size * 2 / 2**20  # at the end, with those of all layers in one message
    assert message < compute
    assert cost(one_node(), LayerStrategy()).sync_ms == pytest.approx(0.2 * message + vectors)
    hardware = one_node().profiles.network.profile
    by_kind = one_node(hardware=replace(hardware, overlap_by_kind={Collective.ALL_REDUCE: 1.5}))
    assert cost(by_kind, LayerStrategy()).sync_ms == pytest.approx(0.5 * message + vectors)
    in_turn = one_node(hardware=replace(hardware, overlap_coe=3.0))
    assert cost(in_turn, LayerStrategy()).sync_ms == pytest.approx(
        message + vectors
    )  # never worse than one after the other


def test_a_posted_receive_slows_the_passes_of_pipelines_alone():
    """And nothing that is no compute."""
    plain = one_node()
    slower = one_node(hardware=replace(plain.profiles.network.profile, overlap_by_kind={Collective.SEND: 1.5}))
    for stages in ((4,), (2, 2)):
        plan = example_plan(plain, stages=stages, layers=(LayerStrategy(2),) * 4, micro_batches=4)
        for stage in range(len(stages)):
            for before, after in zip(plain.stage_parts(plan, stage), slower.stage_parts(plan, stage), strict=True):
                factor = 1.5 if len(stages) > 1 else 1.0
                assert after.terms.passes.forward.compute_ms == pytest.approx(
                    factor * before.terms.passes.forward.compute_ms
                )
                assert after.terms.passes.backward.compute_ms == pytest.approx(
                    factor * before.terms.passes.backward.compute_ms
                )
                assert after.terms.passes.forward.tensor_ms == before.terms.passes.forward.tensor_ms
                assert after.states_mib == before.states_mib


def test_reducing_after_every_micro_batch_costs_each_time_and_keeps_gradients_sharded():
    strategy = LayerStrategy(dp_type=ZERO2)
    late, each = (cost(one_node(async_grad_reduce=flag), strategy, micro_batches=4) for flag in (True, False))
    assert each.passes_ms.backward > late.passes_ms.backward
    assert each.sync_ms < late.sync_ms
    gradients = MATRICES * 2 / 2**20
    assert late.states_mib - each.states_mib == pytest.approx(gradients * 7 / 8)
    assert each.workspace.total_mib >= late.workspace.total_mib


def test_zero2_gathers_the_updated_weights_in_the_open():
    plain, zero2 = (cost(one_node(), LayerStrategy(dp_type=z)) for z in (DDP, ZERO2))
    assert zero2.sync_ms - plain.sync_ms == pytest.approx(0.05 + 0.01 * MATRICES * 2 / 2**20)


def test_zero3_holds_two_gathered_layers_at_most():
    zero2, zero3 = (cost(one_node(), LayerStrategy(dp_type=z)) for z in (ZERO2, ZERO3))
    assert zero3.workspace.total_mib - zero2.workspace.total_mib == pytest.approx(2 * MATRICES * 2 / 2**20)


def test_a_stage_holds_its_micro_batches_in_flight():
    model = one_node()
    plan = example_plan(model, stages=(1, 1, 1, 1), micro_batches=8, global_batch=32, layers=(LayerStrategy(),) * 4)
    for schedule, expected in ((Schedule.ONE_F_ONE_B, [4, 3, 2, 1]), (Schedule.GPIPE, [8, 8, 8, 8])):
        predicted = model.predict(replace(plan, schedule=schedule))
        for stage, count in enumerate(expected):
            held = sum(part.activation_mib for part in model.stage_parts(plan, stage))
            assert predicted.stages[stage].memory.activations_mib == pytest.approx(count * held)


def test_a_middle_stage_holds_its_input_for_each_micro_batch_in_flight():
    model = one_node()
    plan = example_plan(model, stages=(1, 1, 1, 1), micro_batches=8, global_batch=32, layers=(LayerStrategy(),) * 4)
    layer = model.stage_parts(plan, 1)[1].activation_mib
    tokens = plan.micro_batch * SEQ // plan.stage_size
    held = model.predict(plan).stages[1].memory.activations_mib
    assert held == pytest.approx(3 * (layer + tokens * MODEL.hidden_size * 2 / 2**20))


def test_every_stage_keeps_mask_and_positions_and_its_ends_the_ids():
    plan = example_plan(
        one_node(), stages=(1, 1, 1, 1), micro_batches=8, global_batch=32, layers=(LayerStrategy(),) * 4
    )
    masked = MemoryUse(replace(MEMORY, mask_mib={SEQ // 2: 1.5}))
    stages = zip(*(m.predict(plan).stages for m in (one_node(), one_node(memory=masked))), strict=True)
    kept = 2 * SEQ * MODEL.head_dim * 4 + 8 * (4 * len(MODEL.block.weights) + 3)  # positions, powers of the betas
    ids = 2 * 32 // plan.stage_size * (SEQ + 1) * 8 + 8 * plan.micro_batches  # losses, too
    for stage, (without, having) in enumerate(stages):
        more = kept + (ids if stage in (0, 3) else 0)
        assert having.memory.states_mib == pytest.approx(without.memory.states_mib + 4 * 1.5 + more / 2**20, abs=1e-9)


def test_tied_embeddings_add_the_exchange_between_first_and_last_stage():
    tied = replace(MODEL, tied_embeddings=True)
    ends = StageSetting(4, 16, 2, 2)
    for role in ("first", "last"):
        apart, together = (one_node(model=m).vocab_cost(VocabStrategy(), ends, role) for m in (MODEL, tied))
        assert together.sync_ms > apart.sync_ms


@given(valid_plans(), st.integers(1, 4))
def test_every_plan_that_can_run_has_a_price(plan, gpus_per_node):
    """Any strategy, schedule and assumption: finite, positive, and the step is no shorter than its longest stage."""
    model = example(
        num_nodes=plan.world_size,
        gpus_per_node=1,
        model=replace(MODEL, layers=len(plan.layers), hidden_size=64 * 12, heads=12, kv_heads=12, intermediate_size=96),
        sequence_parallel=plan.assumed.sequence_parallel,
        mixed_precision=plan.assumed.mixed_precision,
        async_grad_reduce=plan.assumed.async_grad_reduce,
    )
    device = Device(host_link_gb_per_s=1)
    model = CostModel(model.given, replace(model.profiles, device=device), model.assumed, model.options)
    plan = replace(plan, assumed=model.assumed)
    predicted = model.predict(plan)
    longest = max(plan.micro_batches * sum(s.passes_ms) + s.sync_ms for s in predicted.stages)
    assert predicted.time_s * 1000 >= longest * (1 - 1e-9)
    assert -1e-9 <= predicted.bubble_share < 1
    assert all(s.sync_ms >= 0 and s.passes_ms.forward > 0 for s in predicted.stages)
    assert all(s.memory.total_mib > 0 for s in predicted.stages)
    bounds = [s.memory.total_mib - s.memory.context_mib for s in predicted.stages]
    estimates = [s.memory.tensors_mib for s in predicted.stages]
    assert all(0 < estimate <= bound for estimate, bound in zip(estimates, bounds, strict=True))


@pytest.mark.parametrize(
    "strategy", [LayerStrategy(), LayerStrategy(4), LayerStrategy(4, True), LayerStrategy(2, dp_type=ZERO3)]
)
def test_twice_the_samples_cost_more_but_not_twice(strategy):
    small, large = cost(one_node(), strategy, 16), cost(one_node(), strategy, 32)
    assert small.passes_ms.forward < large.passes_ms.forward < 2 * small.passes_ms.forward
    assert small.passes_ms.backward < large.passes_ms.backward < 2 * small.passes_ms.backward
    assert large.activation_mib == pytest.approx(2 * small.activation_mib)
    assert large.states_mib == small.states_mib


def module_setting(several: bool = True, async_reduce: bool = True) -> Setting:
    assumed = Assumptions(True, Precision.FP32, async_reduce)
    return Setting(4, 4, several, 1, SEQ, assumed, StateBytes.of(NumberTypes.of(Precision.FP32)))


def test_a_plan_of_another_world_model_or_assumption_is_refused():
    model = one_node()
    plan = example_plan(model)
    for other, word in (
        (replace(plan, world_size=16, global_batch=64), "world_size"),
        (replace(plan, layers=plan.layers[:3], stages=(3,)), "pp_division"),
        (replace(plan, assumed=Assumptions(seq_length=SEQ)), "galvatron.assumed"),
    ):
        with pytest.raises(UserError, match=word):
            model.predict(other)
    with pytest.raises(UserError, match="seq_length"):
        one_node(seq_length=None)


@pytest.mark.parametrize(
    ("dp_type", "several", "async_reduce", "room", "states", "working"),
    [
        # 100 MiB of fp32 matrices over 4 ranks: weights 100, gradients 100, moments 200. Activations of no weight.
        (DDP, True, True, Room(0, 0), 400, 0),  # reduced where they are
        (ZERO2, True, True, Room(0, 0), 100 + 100 + 50, 100),
        (ZERO2, True, True, Room(5, 90), 100 + 100 + 50, 90 + 25 - 5),  # next to the kept share of those just reduced
        (ZERO2, False, False, Room(0, 0), 100 + 25 + 50, 200),  # made whole, then joined
        (DDP, True, False, Room(0, 0), 400, 200),  # the micro-batch's own next to the sum of those before
        (ZERO3, False, False, Room(0, 0), 100, 400),  # two gathered layers, and the message of the one behind
        (ZERO3, True, True, Room(0, 7), 25 + 100 + 50, 207 + 25),  # two gathered layers while backward runs
        # Activations of 60 are used up when the gradients stand; a single micro-batch's gradients replace them.
        (DDP, True, True, Room(60, 30), 400, 30),
        (DDP, False, True, Room(60, 30), 300 + 40, 30),
        (ZERO2, False, True, Room(60, 30), 100 + 50, 140),
        (DDP, False, True, Room(1, 90), 300 + 99, 90),  # recompute: its activations are in the working set alone
    ],
)
def test_memory_of_a_module_moment_by_moment(dp_type, several, async_reduce, room, states, working):
    weights = Weights(matrices=25 * 2**20)
    setting = module_setting(several, async_reduce)
    held, most, _ = module_memory(weights, setting, dp_type, 4, room)
    assert (sum(held), most.total_mib) == (pytest.approx(states), pytest.approx(working))


def test_small_modules_of_ddp_join_their_gradients_and_large_or_single_matrices_do_not():
    for count, several, working in ((8 * 2**20, True, 32), (8 * 2**20 + 1, True, 0), (2**20, False, 0)):
        weights = Weights(matrices=count)
        _, most, _ = module_memory(weights, module_setting(), DDP, 4, Room(0, 0), several)
        assert most.total_mib == pytest.approx(working)


def test_a_module_that_no_other_rank_shares_joins_nothing():
    weights = Weights(matrices=25 * 2**20, whole_vectors=2**18)
    states, workspace, _ = module_memory(weights, module_setting(), ZERO3, 1, Room(5, 3))
    assert (sum(states), workspace.total_mib) == (pytest.approx(404), 3)


def test_the_losses_peak_is_no_part_of_what_waiting_micro_batches_hold():
    known = {
        role: {SEQ: replace(tables[SEQ], kept_mib={t: 30.0 / t for t in (1, 2, 4, 8)})}
        for role, tables in MEMORY.vocab.items()
    }
    memory = MemoryUse(replace(MEMORY, vocab=known))
    ends = StageSetting(8, 16, 2, 1), "only"
    peak_only, with_kept = one_node(), one_node(memory=memory)
    before, after = (m.vocab_cost(VocabStrategy(), *ends) for m in (peak_only, with_kept))
    assert (before.activation_mib, after.activation_mib) == (pytest.approx(400), pytest.approx(60))
    assert after.workspace.total_mib == pytest.approx(340)


def test_vocabulary_ulysses_needs_no_collective_of_tokens():
    ends = StageSetting(8, 16, 2, 1), "only"
    split, ulysses = (one_node().vocab_cost(VocabStrategy(4, u), *ends) for u in (False, True))
    assert ulysses.passes_ms.forward == pytest.approx(0.2 + 0.8 * 2)  # 2 samples a rank
    assert split.passes_ms.forward > ulysses.passes_ms.forward
    assert ulysses.states_mib == pytest.approx(4 * split.states_mib)


def test_a_rank_holds_its_share_of_matrices_and_whole_vectors():
    """ZeRO-3 over four ranks, by hand: q, k, v, o and the MLP of four layers, two tables; biases and norms."""
    matrices = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 2 * 1001 * 64
    vectors = 4 * (64 + 32 + 32 + 2 * 64) + 64
    sharded = plan(world_size=4, sdp=True)
    weights, states = (mib * 2**20 for mib in held_mib(sharded, SMALL, 0))
    assert weights == 4 * (matrices // 4 + vectors)
    assert states == 16 * (matrices // 4 + vectors)  # with the gradient and AdamW's moments


STAGE = StageSetting(8, 16, 2, 1)
NARROW_MIB = 16 * SEQ * 1024 * 2 / 2**20  # tokens of a micro-batch in bf16
WIDE_MIB = 16 * SEQ // 4 * 2048 * 2 / 2**20


def message_ms(mib: float) -> float:
    return 0.05 + 0.01 * mib


def test_each_type_is_priced_at_its_own_width_and_length():
    model = two_types()
    for kind, (compute_ms, mib) in enumerate(((0.1 + 0.4 * 8, NARROW_MIB), (2 * (0.1 + 0.4 * 8), WIDE_MIB))):
        layer = model.layer_cost(LayerStrategy(4), STAGE, kind)
        # Eight samples of each of two dp shares; two all-gathers and two reduce-scatters of half the tokens.
        assert layer.passes_ms.forward == pytest.approx(compute_ms / 4 + 4 * message_ms(mib / 2), rel=0.1)
        assert layer.passes_ms.forward == pytest.approx(
            model.profiles.times.layer(kind, 8, SEQ // 4**kind, 4).forward_ms + 4 * message_ms(mib / 2)
        )
    narrow, wide = (model.layer_cost(LayerStrategy(1), STAGE, kind) for kind in (0, 1))
    assert wide.states_mib / narrow.states_mib == pytest.approx(
        WIDE.layer_parameters / NARROW.layer_parameters, rel=1e-3
    )


def test_a_type_prices_as_a_model_of_it_alone_does():
    typed, alone = two_types(), one_node(model=NARROW)
    for strategy in (LayerStrategy(4), LayerStrategy(2, ulysses=True, dp_type=DataParallel.ZERO3, recompute=True)):
        assert typed.layer_cost(strategy, STAGE) == alone.layer_cost(strategy, STAGE)
    split, whole = LayerStrategy(), LayerStrategy(4)
    typed, alone = two_types(sequence_parallel=False), one_node(model=NARROW, sequence_parallel=False)
    assert typed.switch_cost(split, whole, STAGE) == alone.switch_cost(split, whole, STAGE)
    assert typed.boundary_cost(StageSetting(8, 16, 2, 2)) == alone.boundary_cost(StageSetting(8, 16, 2, 2))


def test_between_types_the_smaller_tokens_cross():
    assert [two_types().crossing_type(layer) for layer in range(5)] == [0, 0, 1, 1, 1]
    swapped = (replace(NARROW, seq_length=SEQ // 4), replace(WIDE, seq_length=SEQ))
    assert [two_types(swapped).crossing_type(layer) for layer in range(5)] == [0, 0, 0, 1, 1]


def test_a_plans_switches_and_hand_overs_are_those_of_the_tokens_that_cross():
    model = two_types(sequence_parallel=False)
    split, whole = LayerStrategy(), LayerStrategy(4)
    hops = [
        model.predict(example_plan(model, stages=stages, layers=(split,) * 4)).stages[0].send_ms
        for stages in ((1, 3), (2, 2), (3, 1))
    ]
    assert hops == pytest.approx([message_ms(NARROW_MIB / 4), message_ms(WIDE_MIB / 4), message_ms(WIDE_MIB / 4)])
    for layers, mib in (((split, whole, whole, whole), NARROW_MIB), ((split, split, whole, whole), WIDE_MIB)):
        plan = example_plan(model, layers=layers)
        parts = model.stage_parts(plan, 0)
        switched = model.predict(plan).stages[0].passes_ms.forward - sum(part.passes_ms.forward for part in parts)
        assert switched == pytest.approx(message_ms(mib / 2))


def test_the_embedding_is_of_the_first_type_and_the_head_of_the_last():
    model = two_types()
    first, last, only = (model.vocab_cost(VocabStrategy(4), STAGE, role) for role in ("first", "last", "only"))
    assert first.passes_ms.forward == pytest.approx(message_ms(NARROW_MIB / 2))  # the lookup's reduce-scatter
    loss_ms = 3 * message_ms(8 * SEQ // 4 * 4 / 2**20)
    compute_ms = model.profiles.times.head(8, SEQ // 4, 4).forward_ms
    assert last.passes_ms.forward == pytest.approx(compute_ms + message_ms(WIDE_MIB / 2) + loss_ms)
    assert only.passes_ms.forward == pytest.approx(first.passes_ms.forward + last.passes_ms.forward)


def test_tied_embeddings_of_two_widths_are_refused():
    tied = tuple(replace(shape, tied_embeddings=True) for shape in (NARROW, WIDE))
    with pytest.raises(UserError, match="hidden_size_list: embedding and LM head share their weights"):
        two_types(tied)
