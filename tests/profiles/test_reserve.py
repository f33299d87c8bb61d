"""Memory of a GPU besides tensors, and budgets that keep within it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from cost_examples import MODEL, SEQ

from paddlenlp_galvatron.cost_model import CostModel
from paddlenlp_galvatron.cost_model.costs import Profiles
from paddlenlp_galvatron.options.model_options import Model
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Precision, VocabStrategy
from paddlenlp_galvatron.plan.communicators import stage_groups
from paddlenlp_galvatron.planner import SearchOptions
from paddlenlp_galvatron.planner.question import on_device
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_memory
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import Device, load_data_sheet
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network, analytic_hardware
from paddlenlp_galvatron.profiles.reserve import (
    ALLOCATOR,
    COMMUNICATOR_MIB,
    COMMUNICATORS,
    WORKING,
    MeasuredReserve,
    reserve_of,
)

H100 = Device.named("NVIDIA H100 80GB HBM3")


def priced(of_network: Mapping[str, float] = {}, **of_memory: float) -> CostModel:
    """From profiles that have measured this of the reserve."""
    sheet = load_data_sheet("h100")
    memory, network = analytic_memory(MODEL, Precision.BF16, [SEQ]), analytic_hardware(sheet, 1)
    memory = replace(memory, meta=memory.meta.with_extra({}, **of_memory))
    profiles = Profiles.of(
        Network(replace(network, meta=network.meta.with_extra({}, **of_network))),
        ComputeTimes(analytic_computation(MODEL, sheet, Precision.BF16, [SEQ])),
        MemoryUse(memory),
    )
    return CostModel(MODEL, profiles, Assumptions(True, Precision.BF16, seq_length=SEQ))


@pytest.mark.parametrize("device", [Device(), Device(name="Intel(R) Xeon(R) Platinum 8481C")])
def test_processors_and_files_that_name_no_device_have_none(device):
    reserve = reserve_of(device, 8)
    assert reserve.bound_mib(1000, 100) == 1000 and reserve.context_mib(24576) == 0 and not reserve.parts_on(24576)


def test_the_parts_are_the_reserve_and_tensors_in_the_rest_are_within_the_device():
    for ranks, reserved in ((1, None), (8, None), (8, 1.03)):
        reserve, size = reserve_of(H100, ranks, MeasuredReserve(reserved)), 79.1 * 1024
        context = reserve.context_mib(size)
        assert sum(part.mib for part in reserve.parts_on(size)) == pytest.approx(context)
        for working in (0.0, 2000.0):  # whose freed blocks are next to the tensors
            tensors = size - context - reserve.working * working
            assert reserve.bound_mib(tensors, working) == pytest.approx(size)
            assert reserve.allocator_mib(tensors, working) == pytest.approx(size - reserve.fixed_mib)
        assert all(part.source for part in reserve.parts_on(size))
    assert reserve_of(H100, 1).fixed_mib < reserve_of(H100, 2).fixed_mib  # communicators
    assert reserve_of(H100, 1).context_mib(100) == 100  # nothing is left of a device as small


def test_a_plans_communicators_are_those_that_a_launch_makes():
    """Counted where they are made: most of a rank, and that of all ranks."""
    cost, few = priced(), uniform_plan(layers=MODEL.layers, world_size=8, global_train_batch_size=8, sdp=True)
    many = replace(few, layers=(LayerStrategy(2), *few.layers[1:]), vocab=VocabStrategy(4))
    for plan in (few, many):
        made = [1] * 8
        for ranks, _use in stage_groups(plan, MODEL, SEQ):
            for rank in ranks:
                made[rank] += 1
        [part] = [part for part in cost.reserve_of(plan).parts if part.name == "communicators"]
        assert part.mib == pytest.approx(max(made) * COMMUNICATOR_MIB)
    assert cost.reserve_of(few).fixed_mib < cost.reserve_of(many).fixed_mib
    assert reserve_of(Device(), 8).having(5) == reserve_of(Device(), 8)


def test_a_budget_is_held_to_the_device_and_its_reserve_and_both_are_reported():
    cost, received = priced(), []
    options = SearchOptions(memory_constraint=80, settle_bsz=32, seq_length=SEQ)
    question = on_device(Model((MODEL,), SEQ), options, cost, received.append)
    settled = question.settled
    assert (
        settled.memory_constraint == 79.1
        and len(received) == 2
        and "79.1" in received[0]
        and "communicators" in received[1]
    )
    assert settled.context_mib == pytest.approx(reserve_of(H100, 8).context_mib(79.1 * 1024))
    best = question.search().require()
    assert max(s.memory.total_mib for s in best.prediction.stages) <= 79.1 * 1024
    assert cost.options.context_mib == 0
    given, received = options.model_copy(update={"memory_constraint": 60.0, "context_mib": 0.0}), []
    assert on_device(question.model, given, cost, received.append).settled == given  # the user's own word holds
    assert not received


def test_what_profiles_measured_is_used():
    reserve = priced({"context_mib": 500.0, "communicator_mib": 20.0}, workspaces_mib=90.0).profiles.reserve
    assert reserve.fixed_mib == 500 + 90 + COMMUNICATORS * 20 and reserve.having(3).fixed_mib == 500 + 90 + 3 * 20
    assert all("measured" in part.source for part in reserve.parts)
    measured, assumed = priced(reserved=1.2).profiles.reserve, priced().profiles.reserve
    assert measured.allocator == pytest.approx(0.2) and measured.working == 0  # all is in the measurement
    assert (assumed.allocator, assumed.working) == (ALLOCATOR, WORKING)


def test_a_search_holds_plans_to_the_bound_and_with_the_users_reserve_to_the_estimate():
    options = SearchOptions(memory_constraint=79.1, settle_bsz=32, seq_length=SEQ)
    question = on_device(Model((MODEL,), SEQ), options, priced())
    cost, best = question.cost, question.search().require()
    for stage in best.prediction.stages:
        memory = stage.memory
        freed_mib = cost.profiles.reserve.working * memory.working_mib
        assert memory.context_mib == pytest.approx(question.settled.context_mib + freed_mib)
        tensors_mib = memory.total_mib - memory.context_mib
        assert cost.profiles.reserve.bound_mib(tensors_mib, memory.working_mib) <= 79.1 * 1024 * (1 + 1e-9)
    alone = options.model_copy(update={"context_mib": cost.profiles.reserve.fixed_mib})
    estimate = on_device(question.model, alone, priced()).search().require()
    assert estimate.time_s <= best.time_s
    assert {stage.memory.context_mib for stage in estimate.prediction.stages} == {cost.profiles.reserve.fixed_mib}
