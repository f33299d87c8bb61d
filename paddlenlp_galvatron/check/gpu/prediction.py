"""The part that profiles this node and holds what is predicted of four plans against what they take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.scratch import scratch_folder
from ...base.text import gib
from ...cost_model import CostModel, load, step_traffic_bytes
from ...cost_model.costs import Prediction
from ...launch.processes import launch
from ...plan import Assumptions, ModelShape, Plan, Precision, uniform_plan
from ...profiler.launcher import run_ranks
from ...profiler.options import HardwareOptions, ModelRun, PointOptions, runnable_degrees
from ...profiles import Shape
from ..parity.parity import Case, write_cases
from .findings import Finding, Setting
from .parity import training_assumptions

# Half a billion weights: 10 GiB with their states on one GPU. On CPU: as large as its tensors must be to fill memory.
GPU_MODEL = ModelShape("check", "llama", 8, 2048, 5632, 16, 16, 32_000, 2048)
CPU_MODEL = ModelShape("check", "llama", 4, 256, 704, 8, 8, 2000, 64)
STEPS = 5
LEAST_MEMORY, MOST_MEMORY = 0.75, 1.05  # measured / predicted
SCALAR_BYTES = 2 * 4  # loss and gradient norm, an fp32 number each on every rank, which the cost model leaves out
MIB = 2**20
PROFILE_SHARE = 0.25  # of the part's time, for either profile
CPU_PROFILE_S = 10.0  # for either


def prediction(setting: Setting) -> Iterator[Finding]:
    """Time, memory and bytes of a step, predicted from a profile of this node that is made now."""
    shape = GPU_MODEL if setting.on_gpus else CPU_MODEL
    seq = shape.max_position_embeddings
    assumed = training_assumptions(setting.on_gpus, seq)
    plans = _plans(shape, setting.ranks, assumed)
    profiles = setting.folder / "profiles"
    _profile(setting, shape, assumed.mixed_precision, profiles)
    costs = load(shape, 1, setting.ranks, assumed, folder=profiles)
    measured = _measured(setting, shape, plans)
    for (name, plan), ranks in zip(plans.items(), measured, strict=True):
        yield from _beside(setting, name, plan, costs, ranks)
    if not setting.on_gpus:
        yield setting.left_out("reserved memory", "the host's allocator does not tell it")
    if setting.ranks == 1:
        yield setting.left_out("messages and pipelines", "they need 2 ranks or more")


def _plans(shape: ModelShape, ranks: int, assumed: Assumptions) -> dict[str, Plan]:
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


def _profile(setting: Setting, shape: ModelShape, precision: Precision, folder: Path) -> None:
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


def _measured(setting: Setting, shape: ModelShape, plans: dict[str, Plan]) -> list[list[dict[str, Any]]]:
    """By plan and rank."""
    cases = [Case(plan, shape, "adamw", STEPS) for plan in plans.values()]
    with scratch_folder("galvatron-check-") as folder:
        write_cases(folder, cases)
        worker = f"{__package__}.steps_worker"
        launch(worker, [str(folder)], setting.ranks, setting.folder / "steps", setting.launch_s, device=setting.device)
        return [
            [json.loads((folder / f"{index}.{rank}.json").read_text()) for rank in range(setting.ranks)]
            for index in range(len(cases))
        ]


def _beside(
    setting: Setting, name: str, plan: Plan, costs: CostModel, ranks: list[dict[str, Any]]
) -> Iterator[Finding]:
    predicted: Prediction = costs.predict(plan)
    measured_s = max(rank["step_ms"] for rank in ranks) / 1000
    told = f"predicted {1000 * predicted.time_s:.1f} ms, measured {1000 * measured_s:.1f} ms"
    yield setting.found(f"{name}: step", None, told)  # no figure of a GPU says yet how near it should be
    for number, stage in enumerate(predicted.stages):
        own = ranks[number * plan.stage_size : (number + 1) * plan.stage_size]
        tensors_mib = stage.memory.total_mib - stage.memory.context_mib
        allocated_mib, reserved_mib = (max(rank[f"{kind}_mib"] for rank in own) for kind in ("allocated", "reserved"))
        holds = LEAST_MEMORY <= allocated_mib / tensors_mib <= MOST_MEMORY
        told = f"predicted {gib(tensors_mib)} GiB, allocated {gib(allocated_mib)} GiB"
        if setting.on_gpus:
            most_mib = replace(costs.reserve, parts=()).bound_mib(tensors_mib)
            holds &= reserved_mib <= most_mib
            told += f", reserved {gib(reserved_mib)} GiB of {gib(most_mib)} GiB at most"
        yield setting.found(f"{name}: memory of stage {number}", holds, told)
    if None not in (used := [rank["beside_mib"] for rank in ranks]):
        most = max(rank["communicators"] for rank in ranks)
        yield setting.kept(max(used), costs.reserve.having(most), f"{name}: ")
    counted = sum((Counter(rank["bytes"]) for rank in ranks), Counter[str]())
    if plan.world_size > 1:
        counted["all_reduce"] -= SCALAR_BYTES * plan.world_size
    expected = step_traffic_bytes(plan, costs.models[0])
    told = ", ".join(
        f"{kind} predicted {expected.get(kind, 0) / MIB:.2f} MiB, counted {counted[kind] / MIB:.2f} MiB"
        for kind in sorted({*expected, *(+counted)})
    )
    yield setting.found(f"{name}: bytes", +counted == Counter(expected), told or "none")
