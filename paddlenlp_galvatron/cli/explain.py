"""`galvatron explain`: where a plan's time and memory go, what limits it, and what would change it."""

from __future__ import annotations

from dataclasses import replace
from json import dumps
from typing import Any

from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.options.prices import JobOptions
from paddlenlp_galvatron.planner.explain import explain as find_out
from paddlenlp_galvatron.planner.problem import OriginOptions, read_origin
from paddlenlp_galvatron.report.explain import printed, summary

from .command import App, FromFile, say_note
from .planning import each_watched

app = App()


@app.command(FromFile, OriginOptions, JobOptions, positional={"plan": "PLAN"})
def explain(values: dict[str, Any], json: bool) -> None:
    """Show where a plan's time and memory go, what limits it, which plans come next, and what would change it."""
    options = JobOptions.from_values(values)
    plan, problem = read_origin(OriginOptions.from_values(values), say_note)
    with each_watched() as watch:
        explanation = find_out(plan, replace(problem, watch=watch))
    job = problem.job(options, explanation.prediction.samples_per_s)
    if json:
        say(dumps(summary(explanation, job)))
        return
    console = Console(soft_wrap=True)
    console.print(*printed(explanation, job), sep="\n")
