"""`galvatron report`: a plan as one HTML file that needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from paddlenlp_galvatron.base.reading import open_file
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.plan import UserError
from paddlenlp_galvatron.report.explain import explain
from paddlenlp_galvatron.report.measured import of_plan
from paddlenlp_galvatron.report.origin import OriginOptions, read_origin
from paddlenlp_galvatron.report.page import frontier, render
from paddlenlp_galvatron.training.step_log import StepRecord, read_log

from .command import App, FromFile, answer, say_note
from .watched import each_watched

app = App()

LARGEST_LOG_BYTES = 2**30
LEAST_S, MOST = 1e-9, 1e15  # of a step's time; of a step, its seconds, MiB: any run's, and what a page can draw


class ReportOptions(OriginOptions):
    """The plan, the page and a run's log."""

    output: Path = Field(Path("report.html"), description="the file to write")
    log: Path | None = Field(
        None, description="train_log.jsonl of a run of this plan, to show measured values beside the predicted ones"
    )


@app.command(FromFile, ReportOptions, positional={"plan": "PLAN"})
def report(values: dict[str, Any], json: bool) -> None:
    """Write a page with a plan's layers, memory, time line, limits and what-ifs, and with what a run measured."""
    options = ReportOptions.from_values(values)
    log, output = options.log, options.output
    records = _records(log) if log else []
    read, problem = read_origin(options, say_note)
    own = of_plan(read, records)
    if records and not own:
        raise UserError(f"{log}: holds no step of this plan; name the log of a run under it")
    if log and any(len(record["peak_memory_mib"]) != read.world_size for record in own):
        raise _no_log(log)
    with each_watched() as watch:
        problem = replace(problem, watch=watch)
        explanation = explain(read, problem)
        page = render(explanation, frontier(explanation), own)
    write_text(output, page)
    size = output.stat().st_size
    answer(f"{output}: {size / 1e6:.2f} MB; open it in a browser", json, report=output, bytes=size)


def _records(log: Path) -> list[StepRecord]:
    """Raises UserError for a file that is no log, and for a step that nothing can be drawn of."""
    open_file(log).close()
    if log.stat().st_size > LARGEST_LOG_BYTES:
        raise UserError(f"{log}: has more than {LARGEST_LOG_BYTES:,} bytes; is it the right file?")
    try:
        records = read_log(log)
    except OSError as error:
        raise UserError(f"{log}: cannot be read: {error.strerror}") from None
    if not all(map(_is_drawn, records)) or not records:
        raise _no_log(log)
    return records


def _no_log(log: Path) -> UserError:
    return UserError(f"{log}: is no train_log.jsonl; name the log of a run under this plan")


def _is_drawn(record: StepRecord) -> bool:
    peaks: Any = record.get("peak_memory_mib")
    if not isinstance(peaks, list) or any(type(mib) not in (int, float) for mib in peaks):
        return False
    step_s = record["step_time_s"]
    return 0 <= record["step"] < MOST and LEAST_S < step_s < MOST and all(0 <= mib < MOST for mib in peaks)
