"""The parts that compare measured steps with predictions from a profile of this node, and with PaddleNLP's Trainer on
the same model, weights and batches, in alternating steps."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from ...base import MIB, gib
from ...base.writing import write_text
from ...cost_model import CostModel, load
from ...cost_model.traffic import step_traffic_bytes
from ...launch.processes import LaunchError
from ...measure.journal import Journal
from ...measure.launcher import run_ranks
from ...measure.options import HardwareOptions, ModelRun, PointOptions, runnable_degrees
from ...options.uniform import uniform_plan
from ...plan import ModelShape, Plan, Precision, plan_to_dict
from ...profiles import Shape
from ...training.recipe import Recipe
from ..findings import Finding
from ..validation.accuracy import outcome_of
from ..validation.validate import WORKER, visits_in
from ..validation.work import FILE, JOURNAL, MeasuredPlan, Visit, Work, key_of
from .parity import training_assumptions
from .setting import CheckSetting

# Half a billion weights: 10 GiB with their states on one GPU. On CPU: large enough that tensors dominate memory.
GPU_MODEL = ModelShape("check", "llama", 8, 2048, 5632, 16, 16, 32_000, 2048)
CPU_MODEL = ModelShape("check", "llama", 4, 256, 704, 8, 8, 2000, 64)
STEPS = 5  # measured steps
LEAST_MEMORY, MOST_MEMORY = 0.75, 1.05  # measured / predicted
PROFILE_SHARE = 0.25  # share of the part's time for each profile
CPU_PROFILE_S = 10.0  # time limit of each profile


def prediction(setting: CheckSetting) -> Iterator[Finding]:
    """Time, memory and bytes of a step, predicted from a profile that this part makes of this node."""
    shape = GPU_MODEL if setting.on_gpus else CPU_MODEL
    plans = small_plans(shape, setting.ranks, setting.on_gpus)
    assumed = next(iter(plans.values())).assumed
    profiles = setting.folder / "profiles"
    _profile(setting, shape, assumed.mixed_precision, profiles)
    costs = load(shape, 1, setting.ranks, assumed, folder=profiles)
    measured = _measured(setting, shape, list(plans.values()))
    for (name, plan), visit in zip(plans.items(), measured, strict=True):
        yield from _compare(setting, name, plan, costs, visit)
    if not setting.on_gpus:
        yield setting.skipped("reserved memory", "the host's allocator does not report it")
    if setting.ranks == 1:
        yield setting.skipped("messages and pipelines", "they need 2 ranks or more")


def small_plans(shape: ModelShape, ranks: int, on_gpus: bool) -> dict[str, Plan]:
    """Plans of one strategy, with training's defaults on these devices."""
    assumed = training_assumptions(on_gpus, shape.max_position_embeddings)

    def plan(**options: Any) -> Plan:
        batch = 2 * ranks
        return uniform_plan(
            layers=shape.layers, world_size=ranks, global_train_batch_size=batch, chunks=2, assumed=assumed, **options
        )

    plans = {"data parallel" if ranks > 1 else "one rank": plan(), "recompute": plan(global_checkpoint=True)}
    if ranks > 1:
        plans["tensor parallel"] = plan(global_tp_deg=ranks, vocab_tp=ranks)
        plans["two stages"] = plan(pp_deg=2)
        plans["zero3"] = plan(sdp=True)
    return plans


def _profile(setting: CheckSetting, shape: ModelShape, precision: Precision, folder: Path) -> None:
    each: dict[str, Any] = {
        "output": folder,
        "nproc": setting.ranks,
        "mixed_precision": precision,
        "time_budget_s": max(1.0, PROFILE_SHARE * setting.left_s) if setting.on_gpus else CPU_PROFILE_S,
    }
    seq = shape.max_position_embeddings
    if setting.ranks > 1:
        hardware = HardwareOptions(**each, end_mb=256 if setting.on_gpus else 1)
        run_ranks("hardware", hardware.model_dump_json(), hardware, "messages", max(1.0, setting.left_s))
    options = PointOptions(**each, sequence_parallel=True, max_tp_deg=setting.ranks)
    degrees = tuple(runnable_degrees(shape, setting.ranks, setting.ranks, [seq]))
    run = ModelRun(options=options, shapes=(shape,), points=(Shape(1, seq),), degrees=degrees)
    run_ranks("model", run.model_dump_json(), options, "layers", max(1.0, setting.left_s))


def _measured(setting: CheckSetting, shape: ModelShape, plans: Sequence[Plan]) -> list[Visit]:
    """One visit of each plan, as a validation makes it. Raises LaunchError."""
    work = Work(
        output=setting.folder,
        shape=shape,
        plans=tuple(map(plan_to_dict, plans)),
        steps=STEPS,
        seconds=setting.launch_s,
        ranks_per_node=setting.ranks,
    )
    write_text(setting.folder / FILE, work.model_dump_json())
    setting.launch(WORKER, setting.folder / FILE, logs=setting.folder / "steps")
    visits = visits_in(Journal.open(work.output, JOURNAL, work.identity, rank=0, world_size=1, fresh=False))
    return [visits[key_of(plan)][0] for plan in plans]


def _compare(setting: CheckSetting, name: str, plan: Plan, costs: CostModel, visit: Visit) -> Iterator[Finding]:
    outcome = outcome_of(plan, name, MeasuredPlan.of([visit]), costs, costs.given[0])
    figures = f"predicted {1000 * outcome.predicted_s:.1f} ms, measured {1000 * outcome.measured_s:.1f} ms"
    term = f"{outcome.at_fault} {outcome.off_ms()[outcome.at_fault]:+.1f} ms"
    # No GPU measurement says yet how close it should be.
    yield setting.found(f"{name}: step", None, f"{figures}; {term}")
    for number, stage in enumerate(costs.predict(plan).stages):
        ranks = slice(number * plan.stage_size, (number + 1) * plan.stage_size)
        tensors_mib, allocated_mib = stage.memory.total_mib - stage.memory.context_mib, max(visit.peaks_mib[ranks])
        holds = LEAST_MEMORY <= allocated_mib / tensors_mib <= MOST_MEMORY
        figures = f"predicted {gib(tensors_mib)} GiB, allocated {gib(allocated_mib)} GiB"
        if setting.on_gpus:
            reserved_mib = max(visit.reserved_mib[ranks])
            most_mib = costs.profiles.reserve.allocator_mib(tensors_mib, stage.memory.working_mib)
            holds &= reserved_mib <= most_mib
            figures += f", reserved {gib(reserved_mib)} GiB of {gib(most_mib)} GiB at most"
        yield setting.found(f"{name}: memory of stage {number}", holds, figures)
    if visit.beside_mib:
        yield setting.kept(max(visit.beside_mib), costs.profiles.reserve.having(visit.communicators), f"{name}: ")
    expected, counted = Counter(step_traffic_bytes(plan, costs.given[0])), Counter(visit.bytes)
    figures = ", ".join(
        f"{kind} predicted {expected[kind] / MIB:.2f} MiB, counted {counted[kind] / MIB:.2f} MiB"
        for kind in sorted({*expected, *counted})
    )
    yield setting.found(f"{name}: bytes", counted == expected, figures or "none")


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"  # folder of a checkout; replaces PaddleNLP's GPU-only parts
WARM_UP = 2  # steps
TOLERANCE = 0.03  # of a step's time: the difference between two medians of five steps


def stock(setting: CheckSetting) -> Iterator[Finding]:
    """Compare our step time with PaddleNLP's, for plans that PaddleNLP can express."""
    if not BENCHMARKS.exists():
        yield setting.skipped("PaddleNLP's Trainer", "it needs the folder benchmarks of a checkout of this project")
        return
    shape = GPU_MODEL if setting.on_gpus else CPU_MODEL
    plans = small_plans(shape, setting.ranks, setting.on_gpus)
    for name in (name for name in plans if name not in ("recompute", "zero3")):
        if setting.left_s <= 0:
            yield setting.no_time(name)
            continue
        given_s = setting.launch_s
        try:
            yield _compared(setting, name, plans[name], shape)
        except LaunchError as error:
            yield setting.ended(name, str(error), given_s)
    if setting.ranks == 1:
        yield setting.skipped("tensor parallel and two stages", "they need 2 ranks or more")


def _compared(setting: CheckSetting, name: str, plan: Plan, shape: ModelShape) -> Finding:
    folder = setting.folder / name.replace(" ", "-")
    folder.mkdir(parents=True)
    recipe = Recipe(learning_rate=3e-4, weight_decay=0.01, lr_scheduler_type="constant")
    job = {"plan": plan_to_dict(plan), "shape": asdict(shape), "recipe": recipe.model_dump()}
    (folder / "job.json").write_text(json.dumps(job | {"steps": WARM_UP + STEPS}))
    paths = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        setting.launch("runtime_worker", folder / "job.json", folder / "result.json", logs=folder)
    result = json.loads((folder / "result.json").read_text())
    ours_ms, other_ms = (median(result[side]["steps_ms"][WARM_UP:]) for side in ("ours", "other"))
    losses = zip(result["ours"]["losses"], result["other"]["losses"], strict=True)
    apart = max(abs(ours - other) for ours, other in losses)
    figures = f"{ours_ms:.1f} ms, PaddleNLP {other_ms:.1f} ms: {ours_ms / other_ms:.2f}; losses differ by {apart:.0e}"
    return setting.found(name, ours_ms <= (1 + TOLERANCE) * other_ms if setting.on_gpus else None, figures)
