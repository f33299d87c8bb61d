"""Reads the log of a run for commands that show measured and predicted values, or fit one to the other."""

from pathlib import Path
from typing import Any

from ..base import GIB, UserError, reported
from ..base.reading import open_file
from ..plan import Plan
from ..report.measured import has_all_peaks, of_plan
from ..training.step_log import StepRecord, read_log

LARGEST_LOG_BYTES = GIB
LEAST_S, MOST = 1e-9, 1e15  # s of a step; a step number, seconds or MiB, far beyond any run and still drawable


def steps_under(plan: Plan, log: Path) -> list[StepRecord]:
    """The steps of a train_log.jsonl under this plan. Raises UserError for a file that is no log or has no such step,
    and for a step that cannot be drawn."""
    open_file(log).close()
    if log.stat().st_size > LARGEST_LOG_BYTES:
        raise UserError(f"{log}: has more than {LARGEST_LOG_BYTES:,} bytes; is it the right file?")
    with reported(f"{log}: cannot be read"):
        records = read_log(log)
    of_this_plan = of_plan(plan, records)
    wrong = [record["step"] for record in of_this_plan if not (_is_drawn(record) and has_all_peaks(plan, record))]
    if wrong or not records:
        why = f": no step has the time, memory or load of its step {wrong[0]}" if wrong else ""
        raise UserError(f"{log}: is no train_log.jsonl{why}; name the log of a run under this plan")
    if not of_this_plan:
        raise UserError(f"{log}: holds no step of this plan; name the log of a run under it")
    return of_this_plan


def is_time(value: Any) -> bool:
    """Whether it is a valid step time in seconds."""
    return type(value) in (int, float) and LEAST_S < value < MOST


def _is_drawn(record: StepRecord) -> bool:
    peaks: Any = record.get("peak_memory_mib")
    if not isinstance(peaks, list) or any(type(mib) not in (int, float) for mib in peaks):
        return False
    loads: list[Any] = [record[name] for name in ("moe_imbalance", "moe_imbalance_most") if name in record]
    if any(type(load) not in (int, float) or not 1 <= load < MOST for load in loads):
        return False
    data_s: Any = record.get("data_s", 0.0)
    if type(data_s) not in (int, float) or data_s < 0 or not is_time(record["step_time_s"] - data_s):
        return False
    return 1 <= record["step"] < MOST and is_time(record["step_time_s"]) and all(0 <= mib < MOST for mib in peaks)
