"""The training loop: each step loads its batch, computes and updates; then the run logs, evaluates and saves when due.

An evaluation computes metrics of data sets by the engine's forward passes.
"""

import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

from ..base.process import stop_signals
from ..base.writing import write_text
from ..model.preference import METRICS
from ..runtime import device
from ..runtime.batch import Batch
from ..runtime.collectives import forget_traffic
from ..runtime.engine import Engine
from ..runtime.paddle_private import next_rate
from ..runtime.trace import span
from .checkpoint.loading import load, print_rank_0
from .checkpoint.stored import checkpoint_of, open_checkpoint
from .data.source import BatchSource, InPasses, Rows
from .data.tuning import TuningData
from .events import Events
from .inputs import Sources, prefetch
from .run import RankRun, resume
from .settings import TrainSettings
from .step_log import EVALUATED, STOPPED, StepLog, StepRecord, means_of, now, peaks_to_log

RESTART_S = 10.0  # an elastic launcher restarts ranks while the previous ones may still be ending
LARGEST_EXPONENT = 700.0  # largest number whose exp is a float
SPEEDS = ("_runtime", "_per_second", "_per_second_per_device")  # endings of metrics on the speed of an evaluation


class TrainingLoop:
    """The steps of a run, on every rank. `events` are announced and decide the actions due."""

    def __init__(self, run: RankRun, events: Events | None = None):
        self.run = run
        self.events = events or Events(run.settings, is_first_rank=run.engine.rank == 0)
        self.step = 0  # steps that are done
        self.exit_code = 0  # of a rank's process: 0, or 128 + the signal that stopped it
        self._unlogged: list[StepRecord] = []
        self._nonfinite = run.settings.nonfinite_guard(scaled=run.engine.scaler is not None)

    def steps(self) -> Iterator[StepRecord]:
        """Train to the end; yields the record of each step after its due logging, evaluation and saving. Raises
        GalvatronError."""
        run, events, settings = self.run, self.events, self.run.settings
        alone = settings.folder_locked(wait_s=RESTART_S) if run.engine.rank == 0 else nullcontext()
        with alone, closing(StepLog(settings.log)) as self._log:
            first = self._begin()
            batches = prefetch(lambda step: run.data.rows(step, run.engine.rows), range(first, run.steps))
            with stop_signals() as signals, closing(batches):
                while self.step < run.steps and not events.control.should_training_stop:
                    if self.step == first or self.step % run.epoch_steps == 0:
                        events.on_epoch_begin()
                    with run.traced(self.step + 1):
                        record, stopped = self._train_step(batches, signals, is_first=self.step == first)
                    self.step += 1
                    events.on_step_end(self.step)
                    events.control.should_save |= stopped
                    events.control.should_training_stop |= stopped or self.step == run.steps
                    if stopped and self.step < run.steps:
                        self.exit_code = 128 + next(iter(signals), signal.SIGTERM)  # another rank may have received it
                        sys.stderr.write(f"{STOPPED} step {self.step} of {run.steps}\n")
                    self._log_evaluate_save(record)
                    if events.control.should_training_stop or self.step % run.epoch_steps == 0:
                        events.on_epoch_end()
                        self._log_evaluate_save(record)
                    self._write(record)
                    yield record
            self._end()

    def _begin(self) -> int:
        """Resume; returns the number of finished steps."""
        run = self.run
        run.compute_reference()
        self.step = self._saved = resume(run.settings, run.engine, run.optimizer, run.data, run.recipe, self._log)
        if not self.step:
            self._log.event("started", f"started, {run.steps} steps", step=0)
        self._best, self._writer = run.best_until(self.step), run.writer(self._log)
        if self.step >= run.steps:
            print_rank_0(run.engine, run.settings.nothing_to_do(self.step))
        self._logged_at, self._step_began = time.time(), time.perf_counter()
        self.events.on_train_begin(self.step)
        return self.step

    def _train_step(self, batches: Iterator[Batch], signals: list[int], is_first: bool) -> tuple[StepRecord, bool]:
        """Run the next step; returns its record, and whether any rank got a signal to stop.

        Its time is from the end of the previous step, or of a checkpoint or an evaluation after that, until the device
        has finished this step.
        """
        engine, optimizer = self.run.engine, self.run.optimizer
        loading = time.perf_counter()
        with span("data", "data"):
            batch = next(batches)
        data_s = time.perf_counter() - loading
        share = engine.share(batch)
        self.events.on_step_begin(self.step)
        device.reset_peak()
        forget_traffic()
        loss = engine.forward_backward(share)
        self.events.on_optimizer_begin()
        with span("optimizer", "optimizer"):
            norm = engine.update(optimizer, self.run.settings.max_grad_norm)
        if not math.isfinite(loss) or not (math.isfinite(norm) or engine.scaler):
            text = f"step {self.step + 1}: the loss is {loss}, the norm of the gradients {norm}"
            self._event("nonfinite", text, step=self.step + 1)
        self._nonfinite.count(self.step + 1, loss, norm)
        next_rate(optimizer)
        self.events.on_optimizer_end()
        device.finish_computing()  # zero2's all-gather overlaps the next step
        ended = time.perf_counter()
        seconds, self._step_began = ended - self._step_began, ended
        if is_first:
            traffic = engine.traffic()
            if engine.rank == 0:
                write_text(self.run.settings.traffic, json.dumps(traffic, indent=2) + "\n")
        # One rank may receive a signal one step earlier than another.
        numbers = seconds, data_s, device.peak_mib(), bool(signals), *engine.stage.load.imbalance
        times, loads, peaks, stops, *imbalance = engine.gather(*numbers)
        record = StepRecord(
            step=self.step + 1,
            steps=self.run.steps,
            loss=loss,
            lr=self.run.settings.rate_at(self.step),
            grad_norm=norm,
            step_time_s=max(times),
            data_s=max(loads),
            tokens_per_s=engine.seq_length * engine.plan.global_batch / max(times),
            plan=self.run.plan_id,
            time=now(),
            run=self._log.run,
            peak_memory_mib=peaks_to_log(peaks, engine.plan.pipeline),
            peak_memory_rank=peaks.index(max(peaks)),
        )
        if isinstance(self.run.data, TuningData):
            record["target_tokens_per_s"] = share.labelled / max(times)
            record["filled"] = self.run.data.filled(self.step)
        if means := [mean for mean in imbalance[0] if mean]:
            record["moe_imbalance"] = sum(means) / len(means)
            record["moe_imbalance_most"] = max(imbalance[1])
        if engine.metrics:
            record["metrics"] = engine.metrics
        self._unlogged.append(record)
        return record, any(stops)

    def _write(self, record: StepRecord) -> None:
        """Write the step's log line, again after an evaluation was added."""
        if self.run.engine.rank == 0:
            self._log.write(record)

    def _event(self, event: str, text: str, **facts: Any) -> None:
        if self.run.engine.rank == 0:
            self._log.event(event, text, **facts)

    def _log_evaluate_save(self, record: StepRecord) -> None:
        """Take the actions that are due; an evaluation is added to the record."""
        if self.events.control.should_log and self._unlogged:
            records, self._unlogged, since, self._logged_at = self._unlogged, [], self._logged_at, time.time()
            logs = means_of(records) | {"global_step": self.step}
            self.events.on_log(logs | self.run.speeds("interval", since, len(records)))
        if self.events.control.should_evaluate:
            metrics = self.evaluate()
            print_rank_0(self.run.engine, f"{EVALUATED} step {self.step}: {shown(metrics)}")
            add_metrics(record, metrics)
            if self._best:
                self._best.evaluated(self.step, metrics)
        if self.events.control.should_save and self._nonfinite.advanced:
            self._write(record)  # a run that is killed after the checkpoint resumes after this step
            self._save()

    def evaluate(self, sources: Sources | None = None, prefix: str = "eval") -> dict[str, float]:
        """Metrics of each source, by default of the run's own, by PaddleNLP's names. Raises UserError."""
        metrics: dict[str, float] = {}
        for name, source in self.run.evaluation() if sources is None else sources:
            metrics |= evaluate(self.run, source, f"{prefix}_{name}" if name else prefix, self.events)
        self._step_began = time.perf_counter()
        return metrics

    def _save(self) -> None:
        if self._best:
            self._best.saves(self.step, write=self.run.engine.rank == 0)
        best = self._best if self._best and self._best.step else None
        self._writer.save(self.run.optimizer, best.step if best else None)
        self.events.on_save(best.value if best else None)
        self._saved, self._step_began = self.step, time.perf_counter()

    def _end(self) -> None:
        """Save the last step, and load the weights with the best evaluation, if requested."""
        run, best = self.run, self._best
        run.engine.wait_for_updates()
        self._nonfinite.require_progress()
        if run.settings.saves and self._saved != self.step:
            self._save()
        self._writer.finish()
        if best and best.step not in (None, self.step):
            folder = checkpoint_of(run.settings.output_dir, best.step)
            print_rank_0(run.engine, f"saved {folder} is the best: {run.settings.best_metric} {best.value:.4f}")
            load(open_checkpoint(folder, run.engine.shape), run.engine, run.optimizer)
        event = "done" if self.step >= run.steps else "stopped"
        self._event(event, f"{event} after step {self.step} of {run.steps}", step=self.step)


def train(settings: TrainSettings) -> int:
    """Train by a plan; returns the exit code. Every rank calls this with equal settings. Raises GalvatronError."""
    loop = TrainingLoop(RankRun.of(settings))
    for _ in loop.steps():
        pass
    return loop.exit_code


def batches_of(source: BatchSource, most: int, global_batch: int) -> int:
    """Global batches of one evaluation. `most`: max_evaluate_steps, -1 for the whole split."""
    if isinstance(source, InPasses):
        whole = math.ceil((source.samples or 0) / global_batch)
        return min(most, whole) if most > 0 else whole
    return most if most > 0 else max(1, (source.samples or 0) // global_batch)


def evaluate(run: RankRun, source: BatchSource, prefix: str, events: Events) -> dict[str, float]:
    """Loss, accuracy, and perplexity or DPO's metrics of a source's first batches, by PaddleNLP's names. Raises
    UserError."""
    start, count = time.time(), batches_of(source, run.settings.max_evaluate_steps, run.engine.plan.global_batch)
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
    for batch in prefetch(lambda step: rows(step, engine.rows), range(count)):
        share = engine.share(batch)
        means = {"loss": engine.evaluate(share)} | engine.metrics
        totals.update({name: mean * share.over for name, mean in means.items()})
        seen += share.over
        after_each()
    return {name: total / seen for name, total in totals.items()}


def shown(metrics: Mapping[str, float]) -> str:
    """Metrics in a line, without their speed."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith(SPEEDS))


def add_metrics(record: StepRecord, metrics: Mapping[str, float]) -> None:
    """Add an evaluation to the record of the step before it."""
    record["eval_loss"] = next(value for key, value in metrics.items() if key.endswith("_loss"))
    names = [name for name in ("accuracy", *METRICS) if f"eval_{name}" in metrics]
    record["eval_metrics"] = {name: metrics[f"eval_{name}"] for name in names}
