"""Renders a plan as one HTML file without network: layers, memory, time line, what-ifs, and a run; and the what-if
page: its form, the best plan drawn, and the commands that give it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..base import GIB_MIB, GalvatronError, Infeasible, count, gib, read_json
from ..cost_model import MEMORY, TIME, PlanFacts, StageBreakdown, strategy_words, timeline
from ..cost_model.simulate import Span
from ..model import preset_names
from ..options.texts import text_of
from ..plan import PassKind, Plan, runs
from ..planner.explain import Explanation, FrontierPoint
from ..planner.fit import DEVICE
from ..planner.form import SEARCHED, UNSET, Answer, Form
from ..profiles.data_sheet import data_sheets
from .explain import UNCERTAIN, binding, changed_assumptions
from .measured import WARM_UP_STEPS, stage_peaks_mib
from .plan import assumed
from .search import layer_wise, runner_up

MOST_STEPS = 500  # steps of the log to draw; of more, every n-th
PAGES = Path(__file__).parent / "pages"
COLOURS = read_json(PAGES / "colours.json", comments=True)
MOST_SPANS = 6000  # first spans of a time line to draw
LEAST_MS = 0.05  # least part of a bar, which a table with one decimal would show
LEAST_FOLDED = 0.25  # least share of the step that is folded
FOLD_WIDTH = 0.03  # width of the fold, share of the drawing


def render(
    explanation: Explanation,
    points: Sequence[FrontierPoint],
    records: Sequence[Mapping[str, Any]] = (),
    made_by: Sequence[str] = (),
) -> str:
    """The page. `records`: lines of train_log.jsonl. `made_by`: plan file, date and command, as they are shown."""
    best = explanation.searched.best
    return fill(
        "report.html.jinja",
        **drawn(explanation) | _measured(explanation, records),
        model=explanation.question.model.name,
        premises="; ".join([explanation.origin, *made_by, " ".join(assumed(explanation.assumptions).split())]),
        options=explanation.question.options,
        binds=binding(explanation),
        runners_up=[runner_up(number, other, best) for number, other in enumerate(explanation.searched.runners_up, 2)]
        if best
        else [],
        faster=explanation.faster,
        layer_wise=list(layer_wise(explanation.searched)),
        others=[(strategy_words(other.strategy), other) for other in explanation.one_layer.others],
        what_ifs=explanation.what_ifs,
        changed_assumptions=list(changed_assumptions(explanation)),
        uncertain=UNCERTAIN,
        is_open=any(what_if.is_open for what_if in explanation.what_ifs),
        tokens_per_s=explanation.tokens_per_s,
        points=points,
        frontier_chart=_frontier_chart(points, explanation),
        uplot_js=_as_it_is("uplot/uPlot.iife.min.js"),
        uplot_css=_as_it_is("uplot/uPlot.min.css"),
    )


def fill(template: str, **values: Any) -> Markup:
    """The text of a file in `pages/`."""
    return filled(
        PackageLoader("paddlenlp_galvatron.report", "pages"),
        template,
        colours=COLOURS["strategies"],
        time_colours=COLOURS["time"],
        memory_colours=COLOURS["memory"],
        page_js=_as_it_is("page.js"),
        **values,
    )


def filled(loader: PackageLoader, template: str, **values: Any) -> Markup:
    """A template of a package without its blank lines; values are text in it."""
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["gib"] = gib
    page = environment.get_template(template).render(values)
    return Markup("\n".join(line for line in page.splitlines() if line.strip()) + "\n")


def drawn(facts: PlanFacts) -> dict[str, Any]:
    """Variables of `plan.html.jinja` and `tiles.html.jinja`."""
    plan, prediction, reserve = facts.plan, facts.prediction, facts.cost.reserve_of(facts.plan)
    totals_mib = [stage.memory.total_mib for stage in prediction.stages]
    memories = [stage.memory for stage in prediction.stages] if reserve.parts else []
    bounds_mib = [reserve.bound_mib(memory.total_mib - memory.context_mib, memory.working_mib) for memory in memories]
    strategies = list(dict.fromkeys(strategy_words(layer) for layer in plan.layers))
    step_ms = 1000 * prediction.time_s
    return {
        "plan": plan,
        "device": facts.device_word,
        "stages_words": count(plan.pipeline, "stage"),
        "prediction": prediction,
        "strategies": {words: number % len(COLOURS["strategies"]) for number, words in enumerate(strategies)},
        "grid": list(_grid(plan)),
        "vocabulary": strategy_words(plan.vocab),
        "vocabulary_colour": len(strategies) % len(COLOURS["strategies"]),
        "tiles": tiles(facts),
        "stages": facts.stages,
        "budget_mib": facts.budget_mib,
        "bounds_mib": bounds_mib,
        "widest_mib": max(facts.budget_mib, *totals_mib, *bounds_mib),
        "time_names": TIME,
        "memory_names": MEMORY,
        "peaks_mib": [],
        "bars": [time_bar(stage, step_ms) for stage in facts.stages],
        "timeline": folded(timeline(plan.schedule, prediction.times, plan.micro_batches), plan, step_ms),
    }


def _as_it_is(name: str) -> Markup:
    return Markup((PAGES / name).read_text())  # ours, or the plotting library's


def _grid(plan: Plan) -> Iterator[list[tuple[str, int, str]]]:
    """Runs of like layers by stage: their numbers, their count, and their strategy."""
    for stage in range(plan.pipeline):
        yield [
            (str(layers[run[0]]) if len(run) == 1 else f"{layers[run[0]]}-{layers[run[-1]]}", len(run), words)
            for layers in (plan.chunk_layers(stage, chunk) for chunk in range(plan.chunks))
            for run, words in runs([strategy_words(plan.layers[layer]) for layer in layers])
        ]


def _frontier_chart(points: Sequence[FrontierPoint], explanation: Explanation) -> str:
    here_gb = explanation.question.options.memory_gib
    times = {point.memory_gb: point.time_s for point in points}
    mine = {gb: explanation.prediction.time_s if gb == here_gb else None for gb in sorted({*times, here_gb})}
    return _chart(
        f"memory of a {explanation.device_word}, GiB",
        list(mine),
        ChartLine("best step", [times.get(gb) for gb in mine], COLOURS["lines"]["best"]),
        ChartLine("this plan", list(mine.values()), COLOURS["lines"]["mine"], point=True),
    )


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Data of a chart: s over x."""

    name: str
    values: list[float | None]
    colour: str
    point: bool = False  # draws a single value as a visible point
    dash: bool = False


def _chart(name: str, x: list[float], *lines: ChartLine, from_zero: bool = False) -> str:
    """A chart's data for page.js; the y axis spans the values, or begins at zero."""
    series = [asdict(line) for line in lines]
    return json.dumps({"x": {"name": name, "values": x}, "series": series, "zero": from_zero})


def _measured(explanation: Explanation, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of the log; empty without a log."""
    if not records:
        return {"records": 0}
    settled = records[WARM_UP_STEPS:] or records
    thinned = records[:: max(1, len(records) // MOST_STEPS)]
    steps = [float(record["step"]) for record in thinned]
    predicted_s = explanation.prediction.time_s
    return {
        "records": len(records),
        "measured_s": median(record["step_time_s"] for record in settled),
        "peaks_mib": stage_peaks_mib(explanation.plan, settled),
        "steps_chart": _chart(
            "step",
            steps,
            ChartLine("measured", [float(record["step_time_s"]) for record in thinned], COLOURS["lines"]["mine"]),
            ChartLine("predicted", [predicted_s] * len(steps), COLOURS["lines"]["best"], dash=True),
            from_zero=True,
        ),
    }


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    name: str
    value: str
    note: str = ""


def tiles(facts: PlanFacts) -> tuple[Tile, ...]:
    """Speed, MFU, step time, peak memory, bubble. No MFU if the device's peak is unknown."""
    plan, prediction, speed = facts.plan, facts.prediction, facts.tokens_per_s
    samples = f"{plan.global_batch} samples, {prediction.samples_per_s:.3g} samples/s"
    memory = f"{facts.memory_mib / facts.budget_mib:.0%} of {facts.budget_mib / GIB_MIB:.4g} GiB"
    words = f"{speed:,.0f} on all {plan.world_size}"
    shown = [Tile(f"tokens/s/{facts.device_word}", f"{speed / plan.world_size:,.0f}", words)]
    if facts.mfu and (peak := facts.cost.profiles.device.peak_tflops(plan.assumed)):
        shown.append(Tile("MFU", f"{facts.mfu:.1%}", f"of {peak:,.0f} TFLOP/s"))
    return (
        *shown,
        Tile("step", seconds(prediction.time_s), samples),
        Tile("peak memory", f"{facts.memory_mib / GIB_MIB:.1f} GiB", memory),
        Tile("pipeline bubble", f"{prediction.bubble_share:.1%}", "of all stages' time"),
    )


def seconds(time_s: float) -> str:
    """A time for people: `2.45 s`, `129 ms`, `0.129 ms`."""
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar."""

    key: str  # a key of TIME
    ms: float
    share: float  # share of the step


def time_bar(stage: StageBreakdown, step_ms: float) -> tuple[list[Segment], list[Segment]]:
    """Terms of a stage's step, and the communication that overlaps its computation."""

    def segments(times_ms: Mapping[str, float], least_ms: float) -> list[Segment]:
        long = [(key, times_ms[key]) for key in TIME if times_ms.get(key, 0.0) > least_ms]
        return [Segment(key, ms, ms / step_ms) for key, ms in long]

    return segments(stage.time_ms, 0.0), segments(stage.hidden_ms, LEAST_MS)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Passes as drawn: `spans` of `drawn_ms` in all. Folded, passes after `fold_ms` ran `skipped_ms` later."""

    spans: Sequence[Span]
    drawn_ms: float
    left_out: int  # passes at the end beyond MOST_SPANS
    fold_ms: float = 0.0
    gap_ms: float = 0.0  # width of the fold
    skipped_ms: float = 0.0
    folded: int = 0  # micro-batches within the fold


def folded(spans: Sequence[Span], plan: Plan, step_ms: float) -> Timeline:
    """The time line without the middle of its steady phase, whose rounds are equal."""
    ends = sorted(
        span.stop_ms
        for span in spans
        if span.stage == plan.pipeline - 1 and span.work and (span.work.kind, span.work.chunk) == (PassKind.BACKWARD, 0)
    )
    shown = 2 * plan.pipeline * plan.chunks  # micro-batches at either end: the ramps, and as many rounds
    if len(ends) > 2 * shown + 1:
        first, last = ends[shown], ends[-shown - 1]
        if last - first > LEAST_FOLDED * step_ms:
            gap = FOLD_WIDTH * (step_ms - (last - first))
            earlier = [span for span in spans if span.start_ms < first]
            after = [span for span in spans if span.stop_ms > last]
            shift = last - first - gap
            drawn = [span._replace(stop_ms=min(span.stop_ms, first)) for span in earlier] + [
                span._replace(start_ms=max(span.start_ms, last) - shift, stop_ms=span.stop_ms - shift) for span in after
            ]
            left_out = max(0, len(drawn) - MOST_SPANS)
            return Timeline(drawn[:MOST_SPANS], step_ms - shift, left_out, first, gap, shift, len(ends) - 2 * shown - 1)
    return Timeline(spans[:MOST_SPANS], step_ms, max(0, len(spans) - MOST_SPANS))


# Labels of the form's fields.
LABELS: dict[str, str] = read_json(PAGES / "labels.json")
# Fields of the form by their names in errors.
FIELDS = {"settle_bsz": "global_train_batch_size", "world_size": "num_nodes"}


def faults_of(error: GalvatronError) -> dict[str, str]:
    """Faults by field of the form; those without a field under ""."""
    if isinstance(error, Infeasible):
        about = "memory_constraint" if "GiB per GPU" in str(error) else "global_train_batch_size"
        return {about: str(error)}
    faults: dict[str, str] = {}
    for fault in str(error).split("\n"):
        name, _, why = fault.partition(": ")
        name = name.rpartition(".")[2]  # galvatron.assumed.seq_length: its last word
        field = FIELDS.get(name, name)
        if field not in Form.model_fields:
            field, why = "search_options" if field in SEARCHED else "", fault
        faults.setdefault(field, why)
    return faults


def what_if_page(values: Mapping[str, str], outcome: Answer | GalvatronError, query: str) -> str:
    """The whole page: the form with these values, and the answer."""
    fields = [
        {
            "name": name,
            "label": label,
            "value": values.get(name, ""),
            "unset": UNSET.get(name, ""),
            "help": text_of(Form, name),
        }
        for name, label in LABELS.items()
    ]
    choices = {"model_size": {name: name for name in preset_names()}, "device": {name: name for name in data_sheets()}}
    choices["device"] = {"": f"{DEVICE} (default)"} | choices["device"]
    for name, offered in choices.items():  # such as a path
        offered.setdefault(values.get(name, ""), values.get(name, ""))
    faults = faults_of(outcome) if isinstance(outcome, GalvatronError) else failed(outcome)
    shown = fragment(outcome, query) if isinstance(outcome, Answer) and outcome.result.best else ""
    return fill("what_if.html.jinja", fields=fields, choices=choices, faults=faults, shown=shown)


def failed(outcome: Answer) -> dict[str, str]:
    """The faults of a question without an answer."""
    faults = faults_of(outcome.why_not) if outcome.why_not else {}
    if outcome.enough_nodes:
        faults["num_nodes"] = f"{outcome.enough_nodes} nodes would do"
    return faults


def fragment(outcome: Answer, query: str) -> str:
    """The answer as a part of the page. Raises Infeasible."""
    question = outcome.question
    facts = question.facts_of(outcome.result.plan)
    return fill(
        "answer.html.jinja",
        **drawn(facts),
        model=question.model.name,
        result=outcome.result,
        tokens_per_s=facts.tokens_per_s,
        notes=[assumed(facts.assumptions), *outcome.notes, *([str(facts.cost.load)] if facts.cost.load else [])],
        commands=outcome.commands,
        query=query,
    )
