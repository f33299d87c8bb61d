"""Measured runs of any source: the log of a training with its plan, a validation, or a table (`tables`)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from ...base.errors import UserError
from ...base.reading import read_json
from ...model import ModelShape, load_model
from ...plan import plan_from_dict, read_plan
from ...report.measured import WARM_UP_STEPS, stage_peaks_mib
from ..run_log import is_time, steps_under
from .fit import MeasuredRun
from .tables import Table, read_table

FEWEST = 3  # steps behind those that warm up


def read_runs(source: Path, plan: Path | None, model: str | None, device: str | None) -> Table:
    """`plan`: of a log. `model`, `device`: where the source does not say them. Raises UserError."""
    if source.suffix == ".csv":
        return read_table(source, device=device)
    if device is None:
        raise UserError(f"device: {source} does not name it; give the data sheet to start from, such as h100")
    if source.suffix == ".json":
        return Table(_of_validation(source, _shape(model, source), device))
    if plan is None:
        raise UserError(f"plan: missing; {source} is a training's log, so name the plan that it ran by --plans")
    return Table([_of_log(source, plan, model, device)])


def _shape(model: str | None, source: Path) -> ModelShape:
    if model is None:
        raise UserError(f"model_size: missing, and {source} names no model; give --model_size")
    return load_model(model)


def _of_log(source: Path, plan_path: Path, model: str | None, device: str) -> MeasuredRun:
    plan = read_plan(plan_path)
    searched: dict[str, Any] = plan.metadata.get("searched_from") or {}
    asked = searched.get("model_options")
    named = asked.get("model_size") if isinstance(asked, dict) else searched.get("model")
    shape = _shape(model or (str(named) if named else None), plan_path)
    records = steps_under(plan, source)
    settled = records[WARM_UP_STEPS:]
    if len(settled) < FEWEST:
        raise UserError(
            f"{source}: {len(records)} steps, of which the first {WARM_UP_STEPS} warm up; train {FEWEST} more at least"
        )
    step_s = median(record["step_time_s"] - record.get("data_s", 0.0) for record in settled)
    allocated = max(stage_peaks_mib(plan, records))
    return MeasuredRun(plan_path.stem, str(source), device, shape, plan, step_s, allocated, ours=True)


def _of_validation(source: Path, shape: ModelShape, device: str) -> list[MeasuredRun]:
    content = read_json(source)
    plans = content.get("plans") if isinstance(content, dict) else None
    if not isinstance(plans, list):
        raise UserError(f"{source}: is no validation.json of galvatron validate, no list of plans in it")
    runs = []
    for number, row in enumerate(plans):
        if not isinstance(row, dict) or not is_time(row.get("measured_s")):
            raise UserError(f"{source}: plans.{number}: no measured_s; write it again with galvatron validate")
        plan = plan_from_dict(row.get("plan"))
        name = str(row.get("key", number))
        runs.append(MeasuredRun(name, str(source), device, shape, plan, float(row["measured_s"]), ours=True))
    return runs
