"""Which data a run trains on and is evaluated with; a step's rows are read while the step before computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..plan import ModelShape, Plan, UserError
from .data.dataset import Split
from .data.source import BatchSource, RandomData, TrainingData
from .data.tuning import TuningData
from .settings import TrainSettings

T = TypeVar("T")


def open_data(settings: TrainSettings, plan: Plan, shape: ModelShape, split: Split = "train") -> BatchSource:
    """A split of a run's data, in global batches. Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    tuning, pairs = settings.tuning, settings.preference is not None
    data = tuning.dataset_name_or_path or tuning.train_dataset_path
    if split == "valid" and data is not None and data.is_file():
        if tuning.dev_dataset_path is None:
            raise UserError(f"dev_dataset_path: missing; {data} is trained on, so name what is evaluated")
        data = tuning.dev_dataset_path
    if data is not None:
        return TuningData(
            data,
            tuning.tokenizer_name_or_path or Path(settings.model),
            seq_length,
            shape.vocab_size,
            plan.global_batch,
            split,
            src_length=tuning.max_prompt_len if pairs else tuning.src_length,
            chat_template=tuning.chat_template,
            all_learnt=tuning.autoregressive,
            packing=tuning.rows,
            pairs=pairs,
        )
    if settings.input_dir is None:
        return RandomData(shape.vocab_size, seq_length, plan.global_batch, settings.seed, split)
    return TrainingData(
        settings.input_dir, seq_length, plan.global_batch, settings.seed, split, settings.split, shape.vocab_size
    )


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
