"""Model states are really sharded and passes run in the schedule's order: bytes and orders of real ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, write_cases
from paddlenlp_galvatron.cost_model.simulate import StageTimes, timeline
from paddlenlp_galvatron.cost_model.weights import StateBytes
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import DataParallel, ModelShape, Plan, Precision, Schedule
from paddlenlp_galvatron.plan.schedule import ByKind, chunks_in_flight

from .plans import plan

SEQ = 16
ZERO2, ZERO3 = DataParallel.ZERO2, DataParallel.ZERO3
STATES = {
    "ddp": plan(4, "1 1", batch=4, micro_batches=1),
    "zero2": plan(4, "1 1", batch=4, micro_batches=1, default=ZERO2),
    "zero3": plan(4, "1z 1z 1z 1z", vocab="1z", batch=8, micro_batches=2),
    "zero2 under tp 2": plan(4, "2 2", vocab="2", batch=4, micro_batches=1, default=ZERO2),
    "zero3 under tp 2": plan(4, "2z 2z", vocab="2z", batch=4, micro_batches=1),
    "zero3 over Ulysses": plan(4, "2uz 4uz", vocab="1z", batch=4, micro_batches=1),
    "zero3 in parts of two": plan(4, "1zh2 2uzh2", vocab="1zh2", batch=4, micro_batches=1),
    "two stages": plan(4, "2 1z 2", (1, 2), vocab="2", batch=8, micro_batches=4),
}
PIPELINES_OF_FOUR = {
    "4 stages": plan(4, "1 1 1 1 1", (1, 1, 2, 1), batch=6, micro_batches=6),
    "4 stages, few micro-batches": plan(4, "1 1 1 1", (1,) * 4, batch=2, micro_batches=2),
    "2 stages of 2 chunks, 7 micro-batches": plan(4, "1 " * 4, (1,) * 4, batch=14, micro_batches=7, chunks=2),
    "4 stages, GPipe": plan(4, "1 1 1 1", (1,) * 4, batch=5, micro_batches=5, schedule=Schedule.GPIPE),
}

FEW = ("ddp", "zero2 under tp 2", "zero3", "two stages")


def case_of(of: Plan, hidden: int, precision: Precision = Precision.FP32) -> Case:
    shape = ModelShape("states", "qwen2", len(of.layers), hidden, 3 * hidden, 8, 4, 512, SEQ)
    return Case(replace(of, assumed=replace(of.assumed, seq_length=SEQ, mixed_precision=precision)), shape, "adamw")


def run(folder: Path, cases: list[Case]) -> list[list[dict]]:
    """Reports by case and rank."""
    write_cases(folder, cases)
    world_size = cases[0].plan.world_size
    launch(f"{__package__}.states_worker", [str(folder)], world_size, folder / "log", timeout_s=600)
    return [
        [json.loads((folder / f"{index}.{rank}.json").read_text()) for rank in range(world_size)]
        for index in range(len(cases))
    ]


def arithmetic(case: Case, stage: int) -> dict[str, float]:
    """Bytes on a rank of a stage: matrices by dp type, norms and biases whole. Master copies count as weights."""
    of, shape = case.plan, case.shape
    states = StateBytes.of(of.assumed.number_types)
    master = 0 if of.assumed.mixed_precision is Precision.FP32 else 4
    modules = [(of.layers[index], shape.block.weights) for index in of.stage_layers(stage)]
    if stage == 0:
        modules.append((of.vocab, shape.embedding.weights))
    if stage == len(of.stages) - 1:
        modules.append((of.vocab, shape.head.weights))
    total = dict.fromkeys(("weights", "gradients", "moments"), 0.0)
    for strategy, weights in modules:
        split = {weight: weight.numbers / (1 if weight.axis is None else strategy.tp) for weight in weights}
        matrices = sum(numbers for weight, numbers in split.items() if weight.sharded)
        vectors = sum(split.values()) - matrices
        parts = strategy.sharding or of.stage_size // strategy.tp
        sharding = 1 if strategy.dp_type is DataParallel.DDP else parts
        own = matrices / sharding
        held = own if strategy.dp_type is DataParallel.ZERO3 else matrices
        total["weights"] += states.weight * (held + vectors) + master * (own + vectors)
        total["gradients"] += states.gradient * (own + vectors)
        total["moments"] += 8 * (own + vectors)
    return total


def test_some_plans_on_four_ranks(tmp_path):
    """The states of either kind in one launch."""
    states = {name: case_of(of, 128) for name, of in STATES.items() if name not in FEW}
    states |= {f"{name}, bf16": case_of(STATES[name], 128, Precision.BF16) for name in FEW}
    passes = {name: case_of(of, 16) for name, of in PIPELINES_OF_FOUR.items()}
    reports = run(tmp_path, [*states.values(), *passes.values()])
    require_bytes_of_arithmetic(states, reports[: len(states)])
    require_order_of_simulator(passes, reports[len(states) :])


def require_bytes_of_arithmetic(cases: dict[str, Case], reports: list[list[dict]]) -> None:
    wrong = []
    for (name, case), ranks in zip(cases.items(), reports, strict=True):
        assert len({tuple(report["drawn"]) for report in ranks}) == len(ranks), "ranks share dropout's masks"
        for rank, report in enumerate(ranks):
            for term, expected in arithmetic(case, rank // case.plan.stage_size).items():
                if report[term] != pytest.approx(expected, rel=0.01):
                    wrong.append(f"{name}, rank {rank}: {term} {report[term]:.0f} B instead of {expected:.0f}")
            if "zero3" in name:
                assert 1 <= report["most_gathered"] <= 2, name
            if "zero" in name:  # a layer's, and at the end the embedding's
                assert 1 <= report["most_sent"] <= 2, name
    assert not wrong, "\n".join(wrong)


def require_order_of_simulator(cases: dict[str, Case], reports: list[list[dict]]) -> None:
    for (name, case), ranks in zip(cases.items(), reports, strict=True):
        of = case.plan
        stages, count = of.pipeline, len(of.stages)
        times = StageTimes(ByKind((1.0,) * count, (2.0,) * count), (0.0,) * stages, (0.0,) * (count - 1))
        spans = timeline(of.schedule, times, of.micro_batches)
        for rank, report in enumerate(ranks):
            stage = rank // of.stage_size
            simulated = [[*span.work] for span in spans if span.stage == stage and span.work]
            assert report["passes"] == simulated, f"{name}, rank {rank}"
            assert report["copies"] == [], f"{name}, rank {rank}: copies between host and device within the pipeline"
            peaks = chunks_in_flight(of.schedule, stage, stages, of.micro_batches, of.chunks)
            assert report["most_in_flight"] == max(map(sum, peaks)), f"{name}, rank {rank}"
            if of.schedule is Schedule.ONE_F_ONE_B and of.chunks == 1:
                assert report["most_in_flight"] == min(of.micro_batches, stages - stage), f"{name}, rank {rank}"
