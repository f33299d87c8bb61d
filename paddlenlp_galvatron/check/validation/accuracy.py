"""Accuracy of predictions: errors, rank correlation, regret, and the term at fault; as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from statistics import fmean, median
from typing import Any

from rich.table import Table

from ...base.printing import table
from ...base.units import US_PER_MS
from ...cost_model import CostModel
from ...cost_model.facts import TIME, layouts_ms, part_ms
from ...cost_model.traffic import step_traffic_bytes
from ...plan import DataParallel, LayerStrategy, ModelShape, Plan, VocabStrategy, plan_to_dict, runs
from .work import MeasuredPlan, ValidateOptions, key_of

TERMS = {key: name for key, name in TIME.items() if key not in ("vocabulary", "experts")} | {
    "waiting": "waiting for a neighbouring stage",
    "idle": "waiting for all ranks, data, everything else",
}
BUSY = tuple(name for name in TERMS if name not in ("waiting", "idle"))
COLLECTIVE = "collective"
# Categories of spans with their own term; spans inside them, also collectives, count toward it.
WHOLE = {
    "recompute": "recompute",
    "layout": "layouts",
    "gather": "gathers",
    "gradients": "gradients",
    "sync": "gradients",
}
OPEN = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "wait": "waiting"}


def measured_ms(spans: Iterable[Mapping[str, Any]], step_ms: float) -> dict[str, float]:
    """Terms in ms of a step on one rank; they add up to `step_ms`. `spans`: as `runtime.trace` records them.

    Each moment counts toward the innermost span that has a term. A collective inside a pass or recompute belongs to
    tensor parallelism, inside the optimizer to zero2's weight all-gather; where all ranks meet for loss and norm, it is
    idle time.
    """
    terms = dict.fromkeys(TERMS, 0.0)
    open_spans: list[tuple[float, str]] = []  # end in us, term; from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start, length = span["ts"], span["dur"]
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        outer = open_spans[-1][1] if open_spans else "idle"
        term = _term(span, outer)
        terms[outer] -= length / US_PER_MS
        terms[term] += length / US_PER_MS
        open_spans.append((start + length, term))
    terms["idle"] += step_ms
    return terms


def _term(span: Mapping[str, Any], outer: str) -> str:
    category = span["cat"]
    if outer in ("layouts", "gathers", "gradients"):
        return outer
    if category == COLLECTIVE:
        if outer in ("forward", "backward", "recompute"):
            return "tensor"
        return "publish" if outer == "optimizer" and span["name"] == "all_gather" else "idle"
    return WHOLE.get(category) or OPEN.get(category) or outer


def predicted_ms(plan: Plan, cost: CostModel, stage: int, step_ms: float) -> dict[str, float]:
    """The predicted terms of one stage; `waiting` includes idle time."""
    parts = [part_ms(module.terms, plan.micro_batches) for module in cost.stage_parts(plan, stage)]
    terms = {name: sum(module.get(name, 0.0) for module in parts) for name in BUSY}
    terms["tensor"] += sum(module["experts"] for module in parts)  # inside passes, so measured as one
    terms["layouts"] = layouts_ms(plan, cost, stage)
    return {**terms, "waiting": step_ms - sum(terms.values()), "idle": 0.0}


def busy_ms(terms: Mapping[str, float]) -> float:
    """Time without waiting and idle time."""
    return sum(terms[name] for name in BUSY)


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """One stage, predicted and measured."""

    predicted_ms: Mapping[str, float]  # keyed by TERMS
    measured_ms: Mapping[str, float]  # mean over its ranks, in the reported step
    predicted_mib: float  # tensors
    bound_mib: float  # upper bound of the device's memory
    peak_mib: float  # highest peak of its ranks


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """One plan, predicted and measured."""

    plan: Plan
    kind: str  # how it was chosen: uniform, mixed, …
    predicted_s: float
    measured_s: float
    stages: tuple[StageOutcome, ...]
    predicted_bytes: int  # bytes of a step, summed over ranks
    measured_bytes: int
    quickest_s: tuple[float, ...] = ()  # fastest step of each visit, measured

    @property
    def key(self) -> str:
        return key_of(self.plan)

    @property
    def time_error(self) -> float:
        """Predicted / measured - 1: below 0 the prediction was too optimistic."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_errors(self) -> list[float]:
        """Predicted / measured - 1 of each stage: below 0 it held more than predicted."""
        return [stage.predicted_mib / stage.peak_mib - 1 for stage in self.stages]

    @property
    def over_bound_mib(self) -> float:
        """Peak minus bound of the worst stage: above 0 the bound was exceeded."""
        return max(stage.peak_mib - stage.bound_mib for stage in self.stages)

    def off_ms(self) -> dict[str, float]:
        """Measured minus predicted time by term, for the busiest stage; all waits are one term."""
        stage = max(self.stages, key=lambda stage: busy_ms(stage.measured_ms))
        off = {name: stage.measured_ms[name] - stage.predicted_ms[name] for name in TERMS}
        off["waiting"] += off.pop("idle")
        return off

    @property
    def at_fault(self) -> str:
        """The term with the largest error."""
        off = self.off_ms()
        return max(off, key=lambda name: abs(off[name]))


def outcome_of(plan: Plan, kind: str, run: MeasuredPlan, cost: CostModel, shape: ModelShape) -> PlanOutcome:
    """Raises UserError where the plan cannot be priced."""
    prediction = cost.predict(plan)
    size, reserve = plan.stage_size, cost.reserve_of(plan)
    stages = tuple(
        StageOutcome(
            predicted_ms(plan, cost, number, 1000 * prediction.time_s),
            {name: fmean(terms[name] for terms in run.step.terms_ms[ranks]) for name in TERMS},
            stage.memory.tensors_mib,
            reserve.bound_mib(stage.memory.total_mib - stage.memory.context_mib, stage.memory.working_mib),
            max(run.peaks_mib[ranks]),
        )
        for number, stage in enumerate(prediction.stages)
        for ranks in [slice(number * size, (number + 1) * size)]
    )
    predicted_bytes = sum(step_traffic_bytes(plan, shape, cost.options.task.adapter_rank).values())
    return PlanOutcome(
        plan,
        kind,
        prediction.time_s,
        run.step.seconds,
        stages,
        predicted_bytes,
        sum(run.bytes.values()),
        run.quickest_s,
    )


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of two orders; None if all values of either are equal."""
    from scipy.stats import kendalltau  # imported here, as ranks also import this file

    tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return None if isnan(tau) else tau


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative errors: mean and median of absolute values, signed minimum and maximum."""

    mean: float
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Spread:
        signed = list(errors)
        sizes = [abs(error) for error in signed]
        return cls(fmean(sizes), median(sizes), min(signed), max(signed))


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over all plans of one model."""

    outcomes: Sequence[PlanOutcome]
    failed: Mapping[str, str] = field(default_factory=dict)  # key -> why it did not run
    left_out: int = 0  # plans that did not run for lack of time

    @property
    def time(self) -> Spread:
        return Spread.of(outcome.time_error for outcome in self.outcomes)

    @property
    def apart(self) -> Spread | None:
        """How much slower a plan's slowest visit is than its fastest: no prediction can be more exact. None: one visit
        per plan."""
        repeated = [outcome.quickest_s for outcome in self.outcomes if len(outcome.quickest_s) > 1]
        return Spread.of(max(steps) / min(steps) - 1 for steps in repeated) if repeated else None

    @property
    def memory(self) -> Spread:
        return Spread.of(error for outcome in self.outcomes for error in outcome.memory_errors)

    @property
    def tau(self) -> float | None:
        return kendall([(outcome.predicted_s, outcome.measured_s) for outcome in self.outcomes])

    @property
    def regret(self) -> float:
        """How much slower per sample the plan with the best prediction is than the fastest measured plan."""
        preferred = min(self.outcomes, key=lambda outcome: outcome.predicted_s / outcome.plan.global_batch)
        best = min(outcome.measured_s / outcome.plan.global_batch for outcome in self.outcomes)
        return preferred.measured_s / preferred.plan.global_batch / best - 1

    @property
    def wrong_bytes(self) -> list[PlanOutcome]:
        return [outcome for outcome in self.outcomes if outcome.predicted_bytes != outcome.measured_bytes]

    @property
    def above_bound(self) -> list[PlanOutcome]:
        return [outcome for outcome in self.outcomes if outcome.over_bound_mib > 0]

    def terms(self) -> dict[str, tuple[float, float]]:
        """(predicted, measured) ms of a step by term, means over all plans' stages; waiting and idle as one."""
        stages = [stage for outcome in self.outcomes for stage in outcome.stages]
        sums = {
            name: (fmean(s.predicted_ms[name] for s in stages), fmean(s.measured_ms[name] for s in stages))
            for name in TERMS
        }
        waiting, idle = sums["waiting"], sums.pop("idle")
        return {**sums, "waiting": (waiting[0] + idle[0], waiting[1] + idle[1])}


def shortcomings(accuracy: Accuracy, demanded: ValidateOptions) -> list[str]:
    """Messages for figures that miss their limits."""
    faults = []
    if (most := demanded.most_mean_error) is not None and accuracy.time.mean > most:
        faults.append(
            f"most_mean_error: step times are off by {accuracy.time.mean:.1%} on average, at most {most:.1%} is allowed"
        )
    if (least := demanded.least_tau) is not None and (accuracy.tau is None or accuracy.tau < least):
        faults.append(
            f"least_tau: tau is {accuracy.tau if accuracy.tau is None else round(accuracy.tau, 2)}, {least} is required"
        )
    if (most := demanded.most_memory_error) is not None and -accuracy.memory.lowest > most:
        faults.append(
            f"most_memory_error: a peak is {-accuracy.memory.lowest:.1%} above the prediction, {most:.1%} is allowed"
        )
    if accuracy.failed and (demanded.most_mean_error, demanded.least_tau, demanded.most_memory_error) != (None,) * 3:
        faults.append(f"plans: {len(accuracy.failed)} did not run")
    return faults


DATA_PARALLEL = {DataParallel.DDP: "", DataParallel.ZERO2: "z2", DataParallel.ZERO3: "z3"}


def short(plan: Plan) -> str:
    """`2 stages gpipe, 4x2, 0-3 tp2 z3 r, 4-5 dp, vocab tp2`: stages, micro-batches x samples, layers, vocabulary."""
    head = f"{plan.pipeline} stages {plan.schedule_words}, " if plan.pipeline > 1 else ""
    layers = [f"{_range(run)} {_strategy(layer)}" for run, layer in runs(plan.layers)]
    return ", ".join([f"{head}{plan.micro_batches}x{plan.micro_batch}", *layers, f"vocab {_strategy(plan.vocab)}"])


def _range(run: range) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _strategy(strategy: LayerStrategy | VocabStrategy) -> str:
    layer = strategy.as_layer() if isinstance(strategy, VocabStrategy) else strategy
    split = "".join(f"{axis}{degree}" for axis, degree in layer.axes if degree > 1) or "dp"
    strided = "" if layer.consecutive or layer.ranks == 1 else "s"
    again = f"r({layer.recompute.words})".replace("(full)", "") if layer.recompute else ""  # such as `r(norms+mlp)`
    away = f"h{layer.offload}" if layer.offload else ""  # percent in host memory
    words = [split + strided, DATA_PARALLEL[layer.dp_type], again, away]
    return " ".join(word for word in words if word)


def accuracy_tables(accuracy: Accuracy) -> Iterator[str | Table]:
    """Tables, to print in this order."""
    for shown in _plans(accuracy):
        yield shown
        yield ""
    yield _terms(accuracy)
    yield ""
    for key, why in accuracy.failed.items():
        yield f"plan {key} did not run: {why}"
    if accuracy.left_out:
        yield f"{accuracy.left_out} plans skipped, as the minutes were over; the same command continues"
    if wrong := accuracy.wrong_bytes:
        yield f"bytes of {len(wrong)} plans are not those predicted: {', '.join(outcome.key for outcome in wrong)}"
    if above := accuracy.above_bound:
        excess = ", ".join(f"{outcome.key} by {outcome.over_bound_mib:.2f} MiB" for outcome in above)
        yield f"{len(above)} plans held more than their bound: {excess}"
    yield from summary_lines(accuracy)


def summary_lines(accuracy: Accuracy) -> Iterator[str]:
    """The main figures."""
    tau = "-" if accuracy.tau is None else f"{accuracy.tau:.2f}"
    yield f"{len(accuracy.outcomes)} plans, predicted / measured - 1:"
    yield f"step time    {_spread(accuracy.time)}; Kendall's tau {tau}; regret {accuracy.regret:.1%}"
    if apart := accuracy.apart:
        yield f"repeatability mean {apart.mean:.1%}, median {apart.median:.1%}, up to {apart.highest:.1%} apart"
    yield f"peak memory  {_spread(accuracy.memory)}; above the bound: {len(accuracy.above_bound)}"


def _spread(spread: Spread) -> str:
    return f"mean {spread.mean:.1%}, median {spread.median:.1%}, from {spread.lowest:+.1%} to {spread.highest:+.1%}"


def _plans(accuracy: Accuracy) -> Iterator[Table]:
    """Tables of time, memory and terms; a single table would exceed 80 characters."""
    times = table("plan", "why", "predicted s", "measured s", "error", "layout", left=("why", "layout"))
    rest = table("plan", "MiB", "measured", "error", "busy ms", "at fault", left=("at fault",))
    for outcome in sorted(accuracy.outcomes, key=lambda outcome: outcome.measured_s):
        worst = min(range(len(outcome.stages)), key=lambda stage: outcome.memory_errors[stage])
        stage, off = outcome.stages[worst], outcome.off_ms()
        busiest = max(outcome.stages, key=lambda each: busy_ms(each.measured_ms))
        times.add_row(
            outcome.key,
            outcome.kind,
            f"{outcome.predicted_s:.4f}",
            f"{outcome.measured_s:.4f}",
            f"{outcome.time_error:+.1%}",
            short(outcome.plan),
        )
        rest.add_row(
            outcome.key,
            f"{stage.predicted_mib:.1f}",
            f"{stage.peak_mib:.1f}",
            f"{outcome.memory_errors[worst]:+.1%}",
            f"{busy_ms(busiest.predicted_ms):.0f}/{busy_ms(busiest.measured_ms):.0f}",
            f"{outcome.at_fault} {off[outcome.at_fault]:+.0f}",
        )
    yield times
    yield rest


def _terms(accuracy: Accuracy) -> Table:
    title = "mean over all stages, ms a step"
    shown = table("term", "predicted", "measured", "measured - predicted", title=title)
    for name, (predicted, measured) in accuracy.terms().items():
        numbers = (f"{predicted:.2f}", f"{measured:.2f}", f"{measured - predicted:+.2f}")
        shown.add_row(TERMS[name] if name != "waiting" else "waiting", *numbers)
    return shown


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """The whole accuracy as JSON: `summary`, then each of `plans` and `failed`. Errors are predicted / measured - 1."""
    return {
        "summary": {
            "plans": len(accuracy.outcomes),
            "left_out": accuracy.left_out,
            "time_error": asdict(accuracy.time),
            "visits_apart": asdict(accuracy.apart) if accuracy.apart else None,
            "memory_error": asdict(accuracy.memory),
            "tau": accuracy.tau,
            "regret": accuracy.regret,
            "above_bound": len(accuracy.above_bound),
            "wrong_bytes": len(accuracy.wrong_bytes),
            "terms_ms": {name: {"predicted": p, "measured": m} for name, (p, m) in accuracy.terms().items()},
        },
        "plans": [_plan(outcome) for outcome in accuracy.outcomes],
        "failed": dict(accuracy.failed),
    }


def _plan(outcome: PlanOutcome) -> dict[str, Any]:
    return {
        "key": key_of(outcome.plan),
        "kind": outcome.kind,
        "words": short(outcome.plan),
        "predicted_s": outcome.predicted_s,
        "measured_s": outcome.measured_s,
        "time_error": outcome.time_error,
        "predicted_bytes": outcome.predicted_bytes,
        "measured_bytes": outcome.measured_bytes,
        "at_fault": outcome.at_fault,
        "stages": [asdict(stage) for stage in outcome.stages],
        "plan": plan_to_dict(outcome.plan),
    }
