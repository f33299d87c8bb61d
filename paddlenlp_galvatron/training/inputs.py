"""Opens the data of a run, and reads a step's rows while the step before computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import UserError
from ..plan import ModelShape, Plan
from .data.dataset import Split
from .data.source import BatchSource, RandomData, TrainingData
from .data.tuning import RowLayout, TuningData
from .settings import RANDOM, TrainSettings

T = TypeVar("T")
Sources = list[tuple[str, BatchSource]]  # data to evaluate on; with names where there are several


def open_data(
    settings: TrainSettings,
    plan: Plan,
    shape: ModelShape,
    split: Split = "train",
    on_identity: Callable[[dict[str, Any]], object] = lambda identity: None,
    keep: bool = True,
) -> BatchSource:
    """A split of a run's data, in global batches. `on_identity` gets their identity as soon as it is computed;
    without `keep`, nothing is written next to the data. Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    pairs = settings.preference is not None
    data = settings.dataset_name_or_path or settings.train_dataset_path
    if split == "valid" and data is not None and data.is_file():
        if settings.dev_dataset_path is None:
            raise UserError(f"dev_dataset_path: missing; {data} is trained on, so name evaluation data")
        data = settings.dev_dataset_path
    if data is not None:
        layout = RowLayout(
            seq_length,
            shape.vocab_size,
            settings.max_prompt_len if pairs else settings.src_length,
            settings.chat_template,
            settings.autoregressive,
            settings.effective_packing,
            pairs,
            keep,
        )
        tokenizer = settings.tokenizer_name_or_path or Path(settings.model)
        return TuningData(data, tokenizer, layout, plan.global_batch, split, on_identity)
    opened: BatchSource
    if settings.input_dir is None:
        raise UserError(
            f"input_dir: missing; name the data to train on, or say --input_dir {RANDOM} to try a plan on random tokens"
        )
    if settings.input_dir == RANDOM:
        opened = RandomData(shape.vocab_size, seq_length, plan.global_batch, settings.seed, split)
    else:
        opened = TrainingData(
            settings.input_dir,
            seq_length,
            plan.global_batch,
            settings.seed,
            split,
            settings.split,
            shape.vocab_size,
            keep,
        )
    on_identity(opened.identity)
    return opened


def open_validation(settings: TrainSettings, plan: Plan, shape: ModelShape) -> Sources:
    """The validation split of the run's data. Raises UserError."""
    return [("", open_data(settings, plan, shape, "valid"))]


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
