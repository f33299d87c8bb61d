"""Which data a run trains on and is evaluated with; a step's rows are read while the step before computes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import UserError
from ..plan import ModelShape, Plan
from .data.dataset import Split
from .data.map_dataset import Collator, MapData
from .data.source import BatchSource, InPasses, RandomData, Rows, TrainingData
from .data.tuning import TuningData
from .settings import RANDOM, TrainSettings

if TYPE_CHECKING:  # data are checked before Paddle is imported
    from ..runtime.engine import Engine

T = TypeVar("T")


def open_data(
    settings: TrainSettings,
    plan: Plan,
    shape: ModelShape,
    split: Split = "train",
    known: Callable[[dict[str, Any]], object] = lambda identity: None,
) -> BatchSource:
    """A split of a run's data, in global batches. `known` is called with their identity as soon as that is computed.
    Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    pairs = settings.preference is not None
    data = settings.dataset_name_or_path or settings.train_dataset_path
    if split == "valid" and data is not None and data.is_file():
        if settings.dev_dataset_path is None:
            raise UserError(f"dev_dataset_path: missing; {data} is trained on, so name what is evaluated")
        data = settings.dev_dataset_path
    if data is not None:
        return TuningData(
            data,
            settings.tokenizer_name_or_path or Path(settings.model),
            seq_length,
            shape.vocab_size,
            plan.global_batch,
            split,
            src_length=settings.max_prompt_len if pairs else settings.src_length,
            chat_template=settings.chat_template,
            all_learnt=settings.autoregressive,
            packing=settings.effective_packing,
            pairs=pairs,
            known=known,
        )
    opened: BatchSource
    if settings.input_dir is None:
        raise UserError(
            f"input_dir: missing; name the data to train on, or say --input_dir {RANDOM} to try a plan on random tokens"
        )
    if settings.input_dir == RANDOM:
        opened = RandomData(shape.vocab_size, seq_length, plan.global_batch, settings.seed, split)
    else:
        opened = TrainingData(
            settings.input_dir, seq_length, plan.global_batch, settings.seed, split, settings.split, shape.vocab_size
        )
    known(opened.identity)
    return opened


def prefetch(load: Callable[[int], T], steps: Iterable[int]) -> Generator[T]:
    """Yields `load(step)` for each step; a thread loads the next meanwhile. An error of `load` comes at its step.

    The thread touches no device: page-locked memory is made by a call that may wait for all that the device was given
    to do, and the ids of a step are copied, before its first message, in far less time than a pass takes.
    """
    thread = ThreadPoolExecutor(1, "data")
    loading: deque[Future[T]] = deque()
    try:
        for step in steps:
            loading.append(thread.submit(load, step))
            if len(loading) > 1:
                yield loading.popleft().result()
        while loading:
            yield loading.popleft().result()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


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
