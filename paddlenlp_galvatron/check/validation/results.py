"""Renders an accuracy as tables and as JSON, and a plan in a few words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ...base.printing import table
from ...plan import DataParallel, LayerStrategy, Plan, VocabStrategy, plan_to_dict, runs
from .accuracy import TERMS, Accuracy, Outcome, Spread, busy_ms
from .work import key_of

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
    again = f"r({layer.recompute.words})".replace("(full)", "") if layer.recompute else ""  # or `r(norms+mlp)`
    away = f"h{layer.offload}" if layer.offload else ""  # percent in the host's memory
    words = [split + strided, DATA_PARALLEL[layer.dp_type], again, away]
    return " ".join(word for word in words if word)


def accuracy_tables(accuracy: Accuracy) -> Iterator[str | Table]:
    """Tables to print one below the other."""
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
    """Time, then memory and terms: side by side they are wider than 80 characters."""
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
    """All of it: `summary`, then `plans` and `failed` one by one. Errors are predicted / measured - 1."""
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


def _plan(outcome: Outcome) -> dict[str, Any]:
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
