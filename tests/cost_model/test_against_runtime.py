"""Predicted traffic and memory of a step, against real processes that run one of each plan."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.cost_model import CostModel, CostOptions, Task
from paddlenlp_galvatron.cost_model.costs import Profiles
from paddlenlp_galvatron.cost_model.traffic import step_traffic_bytes
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.memory import MemoryProfiler
from paddlenlp_galvatron.model import kinds_of
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.profiles import ComputationProfile, HardwareProfile, MemoryProfile, Meta, Shape
from paddlenlp_galvatron.profiles.computation import ExpertPass, ExpertTimes
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network

from .cost_cases import RANKS, SEQ, RealCase, real_cases

pytestmark = pytest.mark.slow
SCALAR_BYTES = 2 * 4 * RANKS  # the loss and the gradient's norm, an fp32 scalar each on every rank
DEGREES = (1, 2, 4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[list[dict]]:
    """By rank and case."""
    folder, here = tmp_path_factory.mktemp("steps"), Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(here), prepend=os.pathsep)
        launch("step_worker", [str(folder)], RANKS, folder, timeout_s=1500)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_bytes_by_collective_are_those_of_the_runtime(measured):
    wrong = []
    for index, case in enumerate(real_cases()):
        counted = sum((Counter(rank[index]["bytes"]) for rank in measured), Counter())
        losses = bool(case.shape.experts) + case.shape.mtp_layers  # of balance, and of MTP
        counted["all_reduce"] -= SCALAR_BYTES + 4 * RANKS * losses
        predicted = step_traffic_bytes(case.plan, case.shape, case.adapter_rank)
        if +counted != predicted:
            wrong.append(f"{case.name}: counted {dict(counted)}, predicted {predicted}")
    assert not wrong, "\n".join(wrong)


def cost_model(case: RealCase, memory: MemoryProfile) -> CostModel:
    """Measured memory; times and bandwidths of no account."""
    hardware = HardwareProfile(1, RANKS, {(RANKS, True): 1.0}, {2: 1.0, RANKS: 1.0})
    times = ComputationProfile(
        "fp32",
        case.shape.hidden_size,
        case.shape.heads,
        {number: {Shape(1, SEQ): 1.0} for number in range(len(case.shape.kinds))},
        {Shape(1, SEQ): 1.0},
        experts={1: ExpertTimes(ExpertPass(), ExpertPass(), ExpertPass())},
    )
    profiles = Profiles.of(Network(hardware), ComputeTimes(times), MemoryUse(memory))
    return CostModel(case.shape, profiles, case.plan.assumed, CostOptions(task=Task(case.adapter_rank)))


def test_peak_memory_of_every_stage_is_foreseen(measured):
    """Estimates are at most 4 % too little and 12 % too much. Bounds are at most 0.1 MiB too little (1 % of these tiny
    stages, by small tensors that are not counted); too much by up to 30 %, where all forwards come before the
    gradients that they meet in the bound, or where a stage has several chunks, each of which has its gradients at
    another moment. With adapters, whose transients are a larger share, both are up to 6 % further. With MTP two
    of eight stages take up to 3 % more than that, for a reason not found yet."""
    profiles: dict[str, MemoryProfile] = {}
    wrong = []
    for index, case in enumerate(real_cases()):
        if case.plan.assumed.mixed_precision is not Precision.FP32:
            continue  # CPUs compute in fp32 between 16-bit edges
        if case.shape.fingerprint not in profiles:
            profiler = MemoryProfiler(kinds_of(case.shape), Journal(), samples=2)
            profiles[case.shape.fingerprint] = profiler.measure([SEQ], DEGREES, Meta(), lambda _: None)
        predicted = cost_model(case, profiles[case.shape.fingerprint]).predict(case.plan)
        size = case.plan.stage_size
        for stage, prediction in enumerate(predicted.stages):
            peak = max(rank[index]["peak_mib"] for rank in measured[stage * size : (stage + 1) * size])
            more = 0.06 if case.adapter_rank else 0.0
            estimate, bound = (mib / peak - 1 for mib in (prediction.memory.tensors_mib, prediction.memory.total_mib))
            less = 0.03 * case.shape.mtp_layers
            if not -0.04 - less <= estimate <= 0.12 + more or not -0.01 - less <= bound <= 0.30 + more:
                wrong.append(
                    f"{case.name}, stage {stage}: {prediction.memory}, measured {peak:.1f} MiB, "
                    f"estimate {estimate:+.1%}, bound {bound:+.1%}"
                )
    assert not wrong, "\n".join(wrong)
