"""Reads the log of a run for commands that show measured and predicted values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.reading import open_file
from paddlenlp_galvatron.base.units import GIB
from paddlenlp_galvatron.plan import Plan
from paddlenlp_galvatron.report.measured import has_all_peaks, of_plan
from paddlenlp_galvatron.training.step_log import StepRecord, read_log

LARGEST_LOG_BYTES = GIB
LEAST_S, MOST = 1e-9, 1e15  # of a step's time; of a step, its seconds, MiB: any run's, and what a page can draw


def steps_under(plan: Plan, log: Path) -> list[StepRecord]:
    """The steps of a train_log.jsonl under this plan. Raises UserError for a file that is no log, or has none, and for
    a step that nothing can be drawn of."""
    open_file(log).close()
    if log.stat().st_size > LARGEST_LOG_BYTES:
        raise UserError(f"{log}: has more than {LARGEST_LOG_BYTES:,} bytes; is it the right file?")
    try:
        records = read_log(log)
    except OSError as error:
        raise UserError(f"{log}: cannot be read: {error.strerror}") from None
    no_log = UserError(f"{log}: is no train_log.jsonl; name the log of a run under this plan")
    if not all(map(_is_drawn, records)) or not records:
        raise no_log
    own = of_plan(plan, records)
    if not own:
        raise UserError(f"{log}: holds no step of this plan; name the log of a run under it")
    if not all(has_all_peaks(plan, record) for record in own):
        raise no_log
    return own


def _is_drawn(record: StepRecord) -> bool:
    peaks: Any = record.get("peak_memory_mib")
    if not isinstance(peaks, list) or any(type(mib) not in (int, float) for mib in peaks):
        return False
    loads: list[Any] = [record[name] for name in ("moe_imbalance", "moe_imbalance_most") if name in record]
    if any(type(load) not in (int, float) or not 1 <= load < MOST for load in loads):
        return False
    step_s = record["step_time_s"]
    return 1 <= record["step"] < MOST and LEAST_S < step_s < MOST and all(0 <= mib < MOST for mib in peaks)
