"""One rank of a training run: `python -m paddlenlp_galvatron.training.train_worker SETTINGS.json`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from ..models import load_family
from ..plan import GalvatronError, ModelShape, Plan
from ..runtime import device
from ..runtime.engine import Engine
from ..runtime.groups import run_as_rank, world_from_environment
from .data import BatchSource, RandomData, TrainingData
from .recipe import advance
from .settings import TrainSettings, read_settings


class StepRecord(TypedDict):
    """One line of train_log.jsonl."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_time_s: float
    tokens_per_s: float
    peak_memory_mib: list[float]  # of every rank


def batches_of(settings: TrainSettings, plan: Plan, shape: ModelShape) -> BatchSource:
    """The run's data. Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    if settings.data is None:
        return RandomData(shape.vocab_size, seq_length, plan.global_batch, settings.seed)
    return TrainingData(settings.data, seq_length, plan.global_batch, settings.seed, vocab_size=shape.vocab_size)


def train(settings: TrainSettings) -> Iterator[StepRecord]:
    """Train on this rank; gives the record of every step. Raises GalvatronError."""
    plan, shape = settings.load()
    data = batches_of(settings, plan, shape)
    engine = Engine(plan, shape, load_family(shape.family), plan.assumed.seq_length or 0, seed=settings.seed)
    optimizer = settings.recipe.build(engine.tensors, engine.decaying)
    for step in range(settings.steps):
        batch = data.batch(step)
        device.reset_peak()
        start = time.perf_counter()
        loss = engine.forward_backward(batch)
        if not math.isfinite(loss):
            raise GalvatronError(f"loss is {loss} in step {step}; lower the learning rate or look at the data")
        norm = engine.clip(settings.recipe.max_grad_norm)
        advance(optimizer)
        engine.updated()
        seconds = max(engine.gather(time.perf_counter() - start))
        yield StepRecord(
            step=step,
            loss=loss,
            lr=settings.recipe.rate_at(step),
            grad_norm=norm,
            step_time_s=seconds,
            tokens_per_s=engine.seq_length * plan.global_batch / seconds,
            peak_memory_mib=engine.gather(device.peak_mib()),
        )


def main() -> None:
    settings = read_settings(sys.argv[1])
    rank, _ = world_from_environment()
    with Path(settings.log if rank == 0 else os.devnull).open("w", encoding="utf-8") as log:
        for record in train(settings):
            log.write(json.dumps(record) + "\n")
            log.flush()


if __name__ == "__main__":
    sys.exit(run_as_rank(main))
