"""The walk through a stage's passes, against a count of every moment by hand."""

import random

import pytest

from paddlenlp_galvatron.cost_model.costs import CostOptions, LayerCost, PartMemory, States, Terms, Workspace
from paddlenlp_galvatron.cost_model.stage_memory import memory_of, peak_mib
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan.schedule import Schedule, order, without_repeats

LAYER = PartMemory(fixed_mib=10, gradient_mib=4, kept_mib=4, activation_mib=5, working_mib=3)


def peak(parts, micro_batches: int, schedule: Schedule = Schedule.ONE_F_ONE_B, stage: int = 0, stages: int = 1):
    return peak_mib([parts], order(schedule, stage, stages, micro_batches))


@pytest.mark.parametrize(
    ("micro_batches", "schedule", "stages", "expected"),
    [
        (1, Schedule.ONE_F_ONE_B, 1, 20 + 10 + 3),  # gradients come in the place of activations
        (2, Schedule.ONE_F_ONE_B, 1, 20 + 8 + 10 + 3),  # the second micro-batch meets those of the first
        (2, Schedule.GPIPE, 1, 20 + 20 + 3),  # both are forward before any gradient is there
        (4, Schedule.GPIPE, 1, 20 + 40 + 3),
        (2, Schedule.ONE_F_ONE_B, 2, 20 + 20 + 3),  # two in flight, no further one
        (3, Schedule.ONE_F_ONE_B, 2, 20 + 8 + 20 + 3),  # the third comes in the place of the first
    ],
)
def test_two_plain_layers(micro_batches, schedule, stages, expected):
    assert peak([LAYER, LAYER], micro_batches, schedule, stages=stages) == expected


def test_a_steps_first_backward_makes_gradients_before_its_peak():
    attention = PartMemory(fixed_mib=10, gradient_mib=4, kept_mib=4, activation_mib=5, working_mib=3, made_mib=2)
    assert peak([attention], 3, Schedule.GPIPE) == 10 + 15 + 3 + 2  # later ones find all of them, and less in flight
    assert peak([attention], 2) == 10 + 4 + 5 + 3


def test_recompute_stands_beside_what_the_layers_before_hold():
    again = PartMemory(fixed_mib=10, gradient_mib=4, kept_mib=4, activation_mib=1, working_mib=8)
    # In the backward of the plain layer 6 are in flight; in that of the other one, behind it, 1 and the 4 just made.
    assert peak([again, LAYER], 1) == 20 + max(6 + 3, 1 + 4 + 8)
    assert peak([LAYER, again], 1) == 20 + 6 + 8


def test_zero3_has_two_parts_weights_available_and_joins_its_gradients():
    sharded = PartMemory(
        fixed_mib=5, gradient_mib=4, kept_mib=2, activation_mib=1, working_mib=0.5, gathered_mib=4, joined_mib=4
    )
    assert peak([sharded, sharded], 1) == 10 + 2 - 1 + 4 + 8 + 4  # the first one's gradients, whole and joined
    assert peak([sharded], 1) == 5 + 4 + 4 + 4


def test_an_update_in_turns_has_the_weights_all_gradients_and_one_matrix():
    """Optimizer states in the host's memory: the device has fp32 weights, and one matrix's moments at a time."""
    parts = [LAYER._replace(host_mib=1, master_mib=6, matrix_mib=size) for size in (7, 9)]
    assert peak(parts, 1) == 20 + 2 * (6 + 4) + 9


def test_a_bound_has_room_for_what_neighbours_need() -> None:
    """The message of the LM head is under way, and ZeRO-3's next weights are fetched, while the busiest layer works."""
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=4, chunks=2, sdp=True, embed_sdp=False)

    def part(own_mib: float, message_mib: float, weights_mib: float) -> LayerCost:
        memory = PartMemory(activation_mib=5, working_mib=own_mib)
        return LayerCost.of(Terms(States()), 5, Workspace(own_mib, message_mib, weights_mib), memory)

    memory = memory_of(plan, 0, [[part(1, 7, 0), part(50, 0, 2), part(30, 0, 8)]], CostOptions(), False, shared_mib=2)
    assert (memory.states_mib, memory.activations_mib, memory.working_mib) == (0, 15, 50 + 7 + 8)
    assert memory.tensors_mib <= memory.total_mib


def test_the_embeddings_gradient_comes_last():
    ends = PartMemory(fixed_mib=10, gradient_mib=8, kept_mib=8, late_mib=4, activation_mib=2)
    early = PartMemory(fixed_mib=10, gradient_mib=8, kept_mib=8, activation_mib=2)
    layer = PartMemory(fixed_mib=10, gradient_mib=1, kept_mib=1, activation_mib=3, working_mib=6)
    assert peak([layer, ends], 1) == 20 + 3 + 4 + 6 and peak([layer, early], 1) == 20 + 3 + 8 + 6


@pytest.mark.parametrize(
    ("kept", "micro_batches", "expected"),
    [
        (4, 1, 10 + 4 + 4),  # local ones and the message that they are joined in
        (4, 2, 10 + 4 + 4 + 4),  # next to the sum of the first micro-batch's
        (4, 3, 10 + 4 + 4 + 4),  # the message before, and local ones; or local ones and their message
        (2, 2, 10 + 2 + 4 + 4),  # of ZeRO a half is kept; the message that arrives is as large
        (2, 3, 10 + 2 + 4 + 4 + 2),  # the message before and what arrives of it, and local ones
    ],
)
def test_gradients_reduced_after_every_micro_batch(kept, micro_batches, expected):
    layer = PartMemory(fixed_mib=10, gradient_mib=4, kept_mib=kept, joined_mib=4, activation_mib=1)
    assert peak_mib([[layer]], order(Schedule.ONE_F_ONE_B, 0, 1, micro_batches), reduced_each=True) == expected


def test_late_gradients_stay_whole_until_the_step_ends():
    table = PartMemory(fixed_mib=10, gradient_mib=4, kept_mib=1, late_mib=4, joined_mib=4)
    passes = order(Schedule.ONE_F_ONE_B, 0, 1, 3)
    assert peak_mib([[table]], passes, reduced_each=True) == 10 + 4 + 4


@pytest.mark.parametrize("reduced_each", [False, True])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [(Schedule.ONE_F_ONE_B, 1), (Schedule.GPIPE, 1), (Schedule.ONE_F_ONE_B, 2)]
)
def test_repeats_that_are_left_out_change_no_peak(schedule: Schedule, chunks: int, reduced_each: bool) -> None:
    draw = random.Random(0)
    for micro_batches in range(1, 25):
        parts = [[PartMemory(*(9 * draw.random() for _ in range(8))) for _ in range(2)] for _ in range(chunks)]
        for stage in range(3):
            where = stage, 3, micro_batches, chunks
            all_passes, some = order(schedule, *where), list(without_repeats(schedule.runs(*where), chunks))
            assert peak_mib(parts, some, reduced_each) == pytest.approx(peak_mib(parts, all_passes, reduced_each))
            if (schedule, chunks) == (Schedule.ONE_F_ONE_B, 1) and micro_batches > 8:
                assert len(some) < len(all_passes)
