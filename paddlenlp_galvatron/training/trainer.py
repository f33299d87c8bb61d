"""PaddleNLP's Trainer whose steps a plan's engine runs: its callbacks, schedules, logging, evaluation and saving."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from paddle.nn import Layer
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.integrations import get_available_reporting_integrations
from paddlenlp.trainer.trainer_utils import TrainOutput, speed_metrics

from ..base.writing import write_text
from ..models import load_family
from ..plan import Precision, UserError
from ..runtime import device
from ..runtime.collectives import forget_traffic
from ..runtime.engine import Engine
from .convert import companions
from .data import open_data
from .pretrained import weights_from
from .recipe import Recipe, next_rate
from .resume import resume
from .saving import Writer
from .settings import TrainSettings
from .skips import Skips
from .step_log import StepLog, StepRecord

LARGEST_EXPONENT = 700.0  # of which exp is still a float
RESTART_S = 10.0  # an elastic launcher starts ranks again while those before may still be ending
UNLIKE = {"sequence_parallel", "optim"}  # named as in PaddleNLP, but for other things or with other values


class LocalModel(Layer):  # type: ignore[misc]
    """What this rank trains, as callbacks see a model."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.config = engine.stage.config
        for number, tensor in enumerate(engine.tensors):
            self.add_parameter(str(number), tensor)


class GalvatronTrainer(Trainer):  # type: ignore[misc]
    """Trains by a plan. Every rank of the world makes one from equal settings, and calls `train`."""

    def __init__(self, settings: TrainSettings, callbacks: Sequence[TrainerCallback] = ()):
        """Raises UserError."""
        self.settings = settings
        plan, shape = settings.load_plan()
        self.data = open_data(settings, plan, shape)
        evaluates = settings.evaluates != "no"
        self._validation = open_data(settings, plan, shape, "valid") if evaluates else None
        steps, self._epoch_steps = settings.steps_over(self.data.samples, plan.global_batch)
        self.recipe = settings.recipe.over(steps)
        self.engine = Engine(
            plan,
            shape,
            load_family(shape.family),
            plan.assumed.seq_length or 0,
            source=weights_from(settings.initial_weights, shape) if settings.initial_weights else None,
            seed=settings.seed,
            fp32_gradients=settings.amp_master_grad,
            compute_precision=settings.compute_precision,
            flash_attention=settings.use_flash_attention,
        )
        optimizer = self.recipe.build(self.engine.tensors, self.engine.decaying)
        self._skips = Skips(settings, scaled=self.engine.scaler is not None)
        self.control: Any
        settings.make_output_dir()  # or PaddleNLP does, and its name may not last
        super().__init__(
            LocalModel(self.engine),
            args=paddlenlp_arguments(settings, self.recipe, steps, plan.assumed.mixed_precision),
            callbacks=list(callbacks),
            optimizers=(optimizer, optimizer._learning_rate),
        )
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(steps / self._epoch_steps)
        self.state.is_local_process_zero = self.state.is_world_process_zero = self.engine.rank == 0

    def _wrap_amp_model(self, *_: Any) -> None:
        """The engine has cast its weights by itself."""

    def print_config(self, *_: Any, **__: Any) -> None:
        """The settings' file has it."""

    def train(self) -> TrainOutput:
        """Train to the end, from the checkpoint that the settings ask for. Raises GalvatronError."""
        start, losses = time.time(), []
        alone = self.settings.folder_locked(wait_s=RESTART_S) if self.engine.rank == 0 else nullcontext()
        with alone, closing(StepLog(self.settings.log)) as log:
            for record in self.steps():
                losses.append(record["loss"])
                if self.engine.rank == 0:
                    log.write(record)
        samples = len(losses) * self.engine.plan.global_batch
        metrics = speed_metrics("train", start, samples, len(losses), self.engine.seq_length)
        metrics["train_loss"] = sum(losses) / max(1, len(losses))
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def steps(self) -> Iterator[StepRecord]:
        """Train, giving the record of every step. Raises GalvatronError."""
        state, handler, settings = self.state, self.callback_handler, self.settings
        first = saved = state.global_step = resume(settings, self.engine, self.optimizer, self.data)
        keep, companions = settings.save_total_limit, _companions(settings)
        writer = Writer(settings.checkpoints, self.engine, keep, self.data, companions, settings.log)
        self._unlogged: list[StepRecord] = []
        self._logged_at = time.time()
        self.control = handler.on_train_begin(self.args, state, self.control)
        with told_to_stop() as stop:
            while state.global_step < state.max_steps and not self.control.should_training_stop:
                if state.global_step % self._epoch_steps == 0:
                    self.control = handler.on_epoch_begin(self.args, state, self.control)
                self.control = handler.on_step_begin(self.args, state, self.control)
                record, stops = self._step(state.global_step, stop, first=state.global_step == first)
                state.global_step += 1
                state.epoch = state.global_step / self._epoch_steps
                state.consumed_samples = self.data.first_sample(state.global_step)
                self.control = handler.on_step_end(self.args, state, self.control)
                if state.global_step % self._epoch_steps == 0:
                    self.control = handler.on_epoch_end(self.args, state, self.control)
                self.control.should_training_stop |= stops
                self._unlogged.append(record)
                if self.control.should_log:
                    self._log_interval()
                if self.control.should_evaluate:
                    record["eval_loss"] = self.evaluate()["eval_loss"]
                yield record
                if (self.control.should_save or stops) and self._skips.advanced:
                    saved = self._save(writer)
            self._skips.require_progress()
            if settings.saves and saved != state.global_step:
                self._save(writer)
            writer.finish()

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and perplexity of the validation split, or of its first batches. Raises UserError."""
        start, engine = time.time(), self.engine
        if self._validation is None:
            self._validation = open_data(self.settings, engine.plan, engine.shape, "valid")
        count = self.settings.max_evaluate_steps
        if count < 0:
            count = max(1, (self._validation.samples or 0) // engine.plan.global_batch)
        loss = sum(engine.evaluate(self._validation.batch(number)) for number in range(count)) / count
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_ppl": math.exp(min(loss, LARGEST_EXPONENT))}
        metrics |= speed_metrics(metric_key_prefix, start, count * engine.plan.global_batch, count)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _step(self, step: int, stop: threading.Event, first: bool) -> tuple[StepRecord, bool]:
        """One step of all ranks: its record, and whether any of them was told to stop."""
        engine = self.engine
        batch = self.data.batch(step)
        device.reset_peak()
        forget_traffic()
        start = time.perf_counter()
        loss = engine.forward_backward(batch)
        norm = engine.update(self.optimizer, self.recipe.max_grad_norm)
        self._skips.count(step, loss, norm)
        next_rate(self.optimizer)
        seconds = time.perf_counter() - start
        if first:
            traffic = engine.traffic()
            if engine.rank == 0:
                write_text(self.settings.traffic, json.dumps(traffic, indent=2) + "\n")
        # One rank may hear of SIGTERM a step before another.
        times, peaks, stops = engine.gather(seconds, device.peak_mib(), stop.is_set())
        record = StepRecord(
            step=step,
            loss=loss,
            lr=self.recipe.rate_at(step),
            grad_norm=norm,
            step_time_s=max(times),
            tokens_per_s=engine.seq_length * engine.plan.global_batch / max(times),
            peak_memory_mib=list(peaks),
        )
        return record, any(stops)

    def _log_interval(self) -> None:
        """Log the steps since the last time, by PaddleNLP's names."""
        records, self._unlogged = self._unlogged, []
        samples = len(records) * self.engine.plan.global_batch
        logs = {
            "loss": sum(record["loss"] for record in records) / len(records),
            "learning_rate": records[-1]["lr"],
            "global_step": self.state.global_step,
            "grad_norm": records[-1]["grad_norm"],
            "peak_memory_mib": max(max(record["peak_memory_mib"]) for record in records),
        }
        logs |= speed_metrics("interval", self._logged_at, samples, len(records), self.engine.seq_length)
        self._logged_at = time.time()
        self.log(logs)

    def _save(self, writer: Writer) -> int:
        writer.save(self.optimizer)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return int(self.state.global_step)


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set meanwhile, however often, instead of ending the process.

    Schedulers repeat SIGTERM: once it has come, it also does nothing afterwards, while the process ends by itself.
    """
    event = threading.Event()
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        signal.signal(signal.SIGTERM, signal.SIG_IGN if event.is_set() else before[signal.SIGTERM])


def paddlenlp_arguments(settings: TrainSettings, recipe: Recipe, steps: int, precision: Precision) -> TrainingArguments:
    """The run as PaddleNLP's callbacks know it: whatever has a name there."""
    values = settings.model_dump() | recipe.model_dump()
    known = {field.name for field in fields(TrainingArguments)} - UNLIKE
    values = {name: value for name, value in values.items() if name in known and value is not None}
    return TrainingArguments(
        **values
        | {
            "output_dir": str(settings.output_dir),
            "max_steps": steps,
            "do_train": True,
            "evaluation_strategy": settings.evaluates,
            "bf16": precision is Precision.BF16,
            "fp16": precision is Precision.FP16,
            "device": device.name(),
            "report_to": _reporters(settings),
            "disable_tqdm": True,
        }
    )


def _companions(settings: TrainSettings) -> list[Path]:
    """Files of the model's own folder that turn a checkpoint into a Hugging Face model again."""
    config = Path(settings.model) / "config.json"
    return [config, *companions(config.parent)] if config.exists() else []


def _reporters(settings: TrainSettings) -> list[str]:
    """Where PaddleNLP's callbacks report to. Raises UserError for what is not installed."""
    installed = get_available_reporting_integrations()
    if settings.report_to is None:
        return [name for name in ("visualdl",) if name in installed]
    lacking = [name for name in settings.report_to if name not in installed]
    if lacking:
        raise UserError(f"report_to: {', '.join(lacking)} is not installed; there is: {', '.join(installed) or 'none'}")
    return list(settings.report_to)
