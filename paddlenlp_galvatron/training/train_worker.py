"""One rank of a training run: `python -m paddlenlp_galvatron.training.train_worker SETTINGS.json`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, TypedDict

from ..models import load_family
from ..plan import GalvatronError
from ..plan.files import write_text
from ..runtime import device
from ..runtime.collectives import forget_traffic
from ..runtime.engine import Engine
from ..runtime.groups import run_as_rank, world_from_environment
from .checkpoint import Writer
from .data import open_data
from .recipe import next_rate
from .resume import resume
from .settings import TrainSettings, read_settings

stop = threading.Event()  # set by SIGTERM: save after this step and end


class StepRecord(TypedDict):
    """One line of train_log.jsonl."""

    step: int
    loss: float
    lr: float
    grad_norm: float  # no finite number: the step was left out
    step_time_s: float
    tokens_per_s: float
    peak_memory_mib: list[float]  # of every rank


def train(settings: TrainSettings) -> Iterator[StepRecord]:
    """Train on this rank; gives the record of every step. Raises GalvatronError."""
    plan, shape = settings.load()
    data = open_data(settings, plan, shape)
    engine = Engine(
        plan,
        shape,
        load_family(shape.family),
        plan.assumed.seq_length or 0,
        seed=settings.seed,
        fp32_gradients=settings.amp_master_grad,
        compute_precision=settings.compute_precision,
    )
    optimizer = settings.recipe.build(engine.tensors, engine.decaying)
    first = resume(settings, engine, optimizer)
    writer = Writer(settings.checkpoints, engine, settings.save_total_limit)
    for step in range(first, settings.steps):
        batch = data.batch(step)
        device.reset_peak()
        forget_traffic()
        start = time.perf_counter()
        loss = engine.forward_backward(batch)
        norm = engine.update(optimizer, settings.recipe.max_grad_norm)
        if not math.isfinite(norm):
            _require_skippable(settings, engine, step, loss, norm)
        next_rate(optimizer)
        seconds = time.perf_counter() - start
        if step == first:
            _save_traffic(settings, engine)
        # One rank may hear of SIGTERM a step before another.
        times, peaks, stops = engine.gather(seconds, device.peak_mib(), stop.is_set())
        seconds = max(times)
        yield StepRecord(
            step=step,
            loss=loss,
            lr=settings.recipe.rate_at(step),
            grad_norm=norm,
            step_time_s=seconds,
            tokens_per_s=engine.seq_length * plan.global_batch / seconds,
            peak_memory_mib=list(peaks),
        )
        told_to_stop = any(stops)
        if told_to_stop or (settings.save_steps and (step + 1) % settings.save_steps == 0):
            writer.save(optimizer)
        if told_to_stop:
            break
    writer.finish()


def _save_traffic(settings: TrainSettings, engine: Engine) -> None:
    traffic = engine.traffic()
    if engine.rank == 0:
        write_text(settings.traffic, json.dumps(traffic, indent=2) + "\n")


def _require_skippable(settings: TrainSettings, engine: Engine, step: int, loss: float, norm: float) -> None:
    """Raise GalvatronError for a step without finite loss and gradients, unless it may be left out.

    fp16's gradients overflow now and then until the loss scale fits; the loss itself does not.
    """
    overflow = engine.scaler is not None and math.isfinite(loss)
    if settings.on_nonfinite == "stop" and not overflow:
        raise GalvatronError(
            f"step {step}: the loss is {loss}, the norm of the gradients {norm}; lower learning_rate, look at the "
            "data of this step, or pass --on_nonfinite skip to leave such steps out"
        )


def main() -> None:
    settings = read_settings(sys.argv[1])
    rank, _ = world_from_environment()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    log: TextIO | None = None
    for record in train(settings):
        if log is None:
            log = _open_log(settings.log if rank == 0 else Path(os.devnull), record["step"])
        log.write(json.dumps(record) + "\n")
        log.flush()


def _open_log(path: Path, first: int) -> TextIO:
    """The log with the lines of the steps before `first`; later ones are from a run that this one goes back behind."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first]
    log = path.open("w", encoding="utf-8")
    log.writelines(kept)
    return log


if __name__ == "__main__":
    sys.exit(run_as_rank(main))
