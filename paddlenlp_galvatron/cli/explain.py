"""`galvatron explain`: where a plan's time and memory go, what limits it, and what would change it."""

from dataclasses import replace
from json import dumps
from typing import Any

from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.options.prices import JobOptions
from paddlenlp_galvatron.planner.explain import explain as find_out
from paddlenlp_galvatron.planner.origin import OriginOptions, read_origin
from paddlenlp_galvatron.report.explain import before_searches, by_searches, summary

from .command import App, FromFile, say_note
from .planning import each_watched

app = App()


@app.command(FromFile, OriginOptions, JobOptions, positional={"plan": "PLAN"})
def explain(values: dict[str, Any], json: bool) -> None:
    """Show where a plan's time and memory go, what limits it, which plans come next, and what would change it."""
    options = JobOptions.from_values(values)
    plan, question = read_origin(OriginOptions.from_values(values), say_note)
    console = Console(soft_wrap=True)
    if not json:
        console.print(*before_searches(question.facts_of(plan)), sep="\n")
    with each_watched() as watch:
        explanation = find_out(plan, replace(question, watch=watch))
    job = question.job(options, explanation.prediction)
    if json:
        say(dumps(summary(explanation, job)))
        return
    console.print(*by_searches(explanation, job), sep="\n")
