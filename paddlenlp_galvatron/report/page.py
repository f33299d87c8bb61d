"""A plan as one HTML file, that needs no network: who runs what, memory, time line, what would change it, the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..cost_model import timeline
from ..plan import GalvatronError, Plan
from ..plan.strategy import runs
from .breakdown import MEMORY, TIME, strategy_words
from .explain import Explanation, binding
from .prediction import WARM_UP_STEPS, stage_peaks_mib
from .search import most_mib
from .why import GB_MIB, Problem

BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the plan's, at which the frontier is searched
MOST_SPANS = 6000  # that the time line draws; of more, the first ones
MOST_STEPS = 500  # of the log that are drawn; of more, each n-th
CLASSES = 8  # colours of strategies; further ones are told by their text


@dataclass(frozen=True, slots=True)
class Point:
    """Of the frontier."""

    memory_gb: float
    time_s: float | None  # None: no plan fits


def frontier(problem: Problem) -> list[Point]:
    """The best step time of the plan's batch under budgets around the plan's, each found by a search."""
    points = []
    for share in BUDGETS:
        memory_gb = problem.options.memory_constraint * share
        try:
            time_s = problem.search(memory_constraint=memory_gb).require().time_s
        except GalvatronError:
            time_s = None
        points.append(Point(memory_gb, time_s))
    return points


def render(explanation: Explanation, points: Sequence[Point], records: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page. `records`: lines of train_log.jsonl."""
    plan, prediction = explanation.plan, explanation.prediction
    environment = Environment(
        loader=PackageLoader("paddlenlp_galvatron.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    strategies = list(dict.fromkeys(strategy_words(layer) for layer in plan.layers))
    best = explanation.searched.best
    page = environment.get_template("page.html.jinja").render(
        plan=plan,
        schedule=plan.schedule_words,
        prediction=prediction,
        model=explanation.problem.shapes[0].name,
        options=explanation.problem.options,
        strategies={words: number % CLASSES for number, words in enumerate(strategies)},
        grid=list(_grid(plan)),
        vocabulary=strategy_words(plan.vocab.as_layer()),
        stages=explanation.stages,
        budget_mib=explanation.budget_mib,
        widest_mib=max(explanation.budget_mib, *(stage.memory.total_mib for stage in prediction.stages)),
        time_names=TIME,
        memory_names=MEMORY,
        binds=binding(explanation),
        runners_up=[(other, other.why_slower_than(best), most_mib(other)) for other in explanation.searched.runners_up]
        if best
        else [],
        best=best,
        uniform=explanation.uniform,
        others=[(strategy_words(other.strategy), other) for other in explanation.others],
        what_ifs=explanation.what_ifs,
        tokens_per_s=prediction.samples_per_s * (explanation.problem.options.seq_length or 0),
        isfinite=isfinite,
        gb=GB_MIB,
        points=points,
        line=_line([(point.memory_gb, point.time_s) for point in points if point.time_s is not None]),
        **_time_line(explanation),
        **_measured(plan, records),
    )
    return "\n".join(line for line in page.splitlines() if line.strip()) + "\n"


def _grid(plan: Plan) -> Iterator[list[tuple[str, int, str]]]:
    """Of each stage its runs of like layers: their numbers, how many they are, and their strategy."""
    for stage in range(plan.pipeline):
        yield [
            (str(layers[run[0]]) if len(run) == 1 else f"{layers[run[0]]}-{layers[run[-1]]}", len(run), words)
            for layers in (plan.chunk_layers(stage, chunk) for chunk in range(plan.chunks))
            for run, words in runs([strategy_words(plan.layers[layer]) for layer in layers])
        ]


def _time_line(explanation: Explanation) -> dict[str, Any]:
    plan, prediction = explanation.plan, explanation.prediction
    spans = timeline(plan.schedule, prediction.times, plan.micro_batches)
    return {"spans": spans[:MOST_SPANS], "spans_left_out": max(0, len(spans) - MOST_SPANS)}


def _measured(plan: Plan, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the log says: nothing without one."""
    settled = records[WARM_UP_STEPS:] or records
    every = max(1, len(records) // MOST_STEPS)
    steps = [(float(record["step"]), float(record["step_time_s"])) for record in records[::every]]
    return {
        "records": len(records),
        "measured_s": median(record["step_time_s"] for record in settled) if settled else None,
        "peaks_mib": stage_peaks_mib(plan, settled) if settled else [],
        "steps": _line(steps),
    }


def _line(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Points in a box of 100 x 100, y upwards from 0."""
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return []
    low, high = min(x for x, _ in known), max(x for x, _ in known)
    top = max(y for _, y in known) or 1.0
    return [(100 * (x - low) / ((high - low) or 1.0), 100 - 90 * y / top) for x, y in known]
