"""`galvatron report`: a plan as one HTML file that needs no network."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from shlex import join
from typing import Any

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.check.run_log import steps_under
from paddlenlp_galvatron.planner.explain import explain, frontier
from paddlenlp_galvatron.planner.origin import OriginOptions, read_origin
from paddlenlp_galvatron.report.explain import before_searches
from paddlenlp_galvatron.report.measured import WARM_UP_STEPS, predicted_and_measured
from paddlenlp_galvatron.report.page import render

from .command import App, FromFile, answer, say_note
from .planning import each_watched

app = App()


class ReportOptions(OriginOptions):
    """Options: the plan, the page and the log of a run."""

    output: Path = Path("report.html")
    log: Path | None = None


@app.command(FromFile, ReportOptions, positional={"plan": "PLAN"})
def report(values: dict[str, Any], json: bool) -> None:
    """Write a page with a plan's layers, memory, time line, limits and what-ifs, and with a run's measurements."""
    options = ReportOptions.from_values(values)
    log, output = options.log, options.output
    read, question = read_origin(options, say_note)
    steps = steps_under(read, log) if log else []
    if not json:  # searches take a while
        Console(soft_wrap=True).print(*before_searches(question.facts_of(read)), sep="\n")
    with each_watched() as watch:
        question = replace(question, watch=watch)
        explanation = explain(read, question)
        command = join(["galvatron", "report", *(f"--{name}={value}" for name, value in values.items())])
        made_by = f"plan {options.plan}", f"{date.today()}", command
        page = render(explanation, frontier(explanation), steps, made_by)
    write_text(output, page)
    size = output.stat().st_size
    if len(steps) > WARM_UP_STEPS:
        Console(stderr=json).print(predicted_and_measured(read, steps))
    answer(f"{output}: {size / 1e6:.2f} MB; open it in a browser", json, report=output, bytes=size)
