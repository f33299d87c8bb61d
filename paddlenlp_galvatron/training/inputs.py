"""Which data a run trains on and is evaluated with."""

from __future__ import annotations

from ..data.dataset import Split
from ..data.source import BatchSource, RandomData, TrainingData
from ..plan import ModelShape, Plan
from .settings import TrainSettings


def open_data(settings: TrainSettings, plan: Plan, shape: ModelShape, split: Split = "train") -> BatchSource:
    """A split of a run's data, in global batches. Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    if settings.input_dir is None:
        return RandomData(shape.vocab_size, seq_length, plan.global_batch, settings.seed, split)
    return TrainingData(
        settings.input_dir, seq_length, plan.global_batch, settings.seed, split, settings.split, shape.vocab_size
    )
