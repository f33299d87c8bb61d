"""Evaluates a run: metrics of data sets by the engine's forward passes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ..model.preference import METRICS
from ..runtime.engine import Engine
from .data.source import BatchSource, InPasses, Rows
from .data.tuning import TuningData
from .events import Events
from .inputs import prefetch
from .run import Run
from .step_log import StepRecord

LARGEST_EXPONENT = 700.0  # of which exp is still a float
SPEEDS = ("_runtime", "_per_second", "_per_second_per_device")  # endings of metrics that say how fast an evaluation was


def batches_of(source: BatchSource, most: int, global_batch: int) -> int:
    """Global batches of one evaluation. `most`: max_evaluate_steps, -1 for the whole split."""
    if isinstance(source, InPasses):
        whole = math.ceil((source.samples or 0) / global_batch)
        return min(most, whole) if most > 0 else whole
    return most if most > 0 else max(1, (source.samples or 0) // global_batch)


def evaluate(run: Run, source: BatchSource, prefix: str, events: Events) -> dict[str, float]:
    """Loss, accuracy, and perplexity or DPO's metrics of a source's first batches, by PaddleNLP's names. Raises
    UserError."""
    start, count = time.time(), batches_of(source, run.settings.max_evaluate_steps, run.engine.plan.global_batch)
    events.on_evaluation_begin(source, count)
    if run.reference is not None and isinstance(source, TuningData):
        run.reference.attach(source)
    means = mean_metrics(run.engine, source.pass_rows, count, events.on_prediction_step)
    if run.settings.preference is None:
        means["ppl"] = math.exp(min(means["loss"], LARGEST_EXPONENT))
    metrics = {f"{prefix}_{name}": mean for name, mean in means.items()}
    metrics |= run.speeds(prefix, start, count)
    events.on_log(dict(metrics))
    events.on_evaluate(metrics)
    return metrics


def mean_metrics(engine: Engine, rows: Rows, count: int, after_each: Callable[[], object]) -> dict[str, float]:
    """The loss of a token with a label, or of a pair, over the first global batches, and metrics with it."""
    totals, seen = Counter[str](), 0
    for own in prefetch(lambda step: rows(step, engine.rows), range(count)):
        share = engine.share(own)
        means = {"loss": engine.evaluate(share)} | engine.metrics
        totals.update({name: mean * share.over for name, mean in means.items()})
        seen += share.over
        after_each()
    return {name: total / seen for name, total in totals.items()}


def shown(metrics: Mapping[str, float]) -> str:
    """Metrics in a line, without how long they took."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith(SPEEDS))


def add_metrics(record: StepRecord, metrics: Mapping[str, float]) -> None:
    """Add an evaluation to the record of the step before it."""
    record["eval_loss"] = next(value for key, value in metrics.items() if key.endswith("_loss"))
    known = [name for name in ("accuracy", *METRICS) if f"eval_{name}" in metrics]
    record["eval_metrics"] = {name: metrics[f"eval_{name}"] for name in known}
