"""The data that a run is evaluated on, and the loss there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..plan import ModelShape, Plan, UserError
from ..runtime.engine import Engine
from .data.map_dataset import Collator, MapData
from .data.source import BatchSource, InPasses
from .inputs import open_data, prefetch
from .loader import Rows
from .settings import TrainSettings


class Evaluation:
    """The validation split of the run's data, or data sets of the user's own."""

    def __init__(self, settings: TrainSettings, plan: Plan, shape: ModelShape, collator: Collator | None = None):
        self._settings, self._plan, self._shape, self._collator = settings, plan, shape, collator
        self._split: BatchSource | None = None

    def open(self, dataset: Any, name: str = "eval_dataset") -> BatchSource:
        """Raises UserError."""
        if dataset is None:
            self._split = self._split or open_data(self._settings, self._plan, self._shape, "valid")
            return self._split
        length, batch = self._plan.assumed.seq_length or 0, self._plan.global_batch
        return MapData(name, dataset, length, self._shape.vocab_size, batch, self._collator, shuffle=False)

    def steps(self, source: BatchSource) -> int:
        """Global batches of one evaluation."""
        most, samples = self._settings.max_evaluate_steps, source.samples or 0
        if isinstance(source, InPasses):
            whole = math.ceil(samples / self._plan.global_batch)
            return min(most, whole) if most > 0 else whole
        return most if most > 0 else max(1, samples // self._plan.global_batch)


def rows_of(source: BatchSource) -> Rows:
    """The rows of one pass."""
    return source.last_rows if isinstance(source, InPasses) else source.rows


def mean_metrics(engine: Engine, rows: Rows, count: int, after_each: Callable[[], object]) -> dict[str, float]:
    """The loss of a token with a label, or of a pair, over the first global batches, and what is told beside it."""
    totals, seen = Counter[str](), 0
    for own in prefetch(lambda step: rows(step, engine.rows), range(count)):
        share = engine.share(own)
        means = {"loss": engine.evaluate(share)} | engine.metrics
        totals.update({name: mean * share.over for name, mean in means.items()})
        seen += share.over
        after_each()
    return {name: total / seen for name, total in totals.items()}


def require_evaluation_data(dataset: Any, own_training_data: bool) -> None:
    """Raise UserError for a run on data of the user's own that brings none to evaluate on."""
    if dataset is None and own_training_data:
        raise UserError("eval_dataset: missing; training is on a train_dataset, which has no validation split")
