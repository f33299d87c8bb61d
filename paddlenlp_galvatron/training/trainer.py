"""PaddleNLP's Trainer whose steps a plan's engine runs: its callbacks, schedules, logging, evaluation and saving."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from paddle.io import DataLoader
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.trainer_utils import TrainOutput, speed_metrics

from ..base.errors import UserError
from ..base.process import told_to_stop
from ..base.tracing import Event, join_traces, write_events
from ..base.writing import write_text
from ..model.preference import METRICS
from ..plan import plan_id
from ..runtime import device
from ..runtime.adapters import load_family
from ..runtime.batch import Batch
from ..runtime.collectives import forget_traffic
from ..runtime.engine import Engine
from ..runtime.paddle_private import next_rate, schedule_of
from ..runtime.topology import PlanGroup
from ..runtime.trace import span, traced
from .checkpoint.companions import companions
from .checkpoint.loading import load
from .checkpoint.saving import Writer, save_model
from .checkpoint.stored import SMALLER, Best, checkpoint_of, open_checkpoint
from .checkpoint.weight_files import CONFIG
from .data.map_dataset import Collator, MapData, sample_length
from .data.source import BatchSource
from .data.tuning import TuningData
from .initial_weights import Reference, initial_weights, set_rates
from .inputs import Evaluation, mean_metrics, open_data, prefetch, require_evaluation_data
from .resume import print_rank_0, resume
from .settings import TrainSettings
from .step_log import EVALUATED, STOPPED, StepLog, StepRecord, told_peaks
from .surface import (
    LocalModel,
    RunArguments,
    SyncParallelInfo,
    inputs_of,
    loader,
    refuse_arguments,
    refuse_overrides,
    run_arguments,
    without_unsupported,
)

SPEEDS = ("_runtime", "_per_second")  # of an evaluation's metrics, how fast it was
LARGEST_EXPONENT = 700.0  # of which exp is still a float
RESTART_S = 10.0  # an elastic launcher starts ranks again while those before may still be ending


@without_unsupported
class GalvatronTrainer(Trainer):  # type: ignore[misc]
    """Trains by a plan. Every rank of the world makes one from equal arguments, and calls `train`."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Collator | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        **others: Any,
    ):
        """As PaddleNLP's Trainer is made, by the same keywords.

        `model`: a preset's name, a Hugging Face directory, a config.json or PaddleNLP's config; or, without `args`,
        the settings of a whole run. `args`: GalvatronTrainingArguments, which name the plan. `train_dataset`:
        map-style, its items tokens or dicts of input_ids and labels; without, the data that settings name.
        `eval_dataset`: the same, or a dict of several. `tokenizer`: is saved with the model. Raises UserError, for what
        else PaddleNLP takes, too.
        """
        refuse_arguments(others)
        if not isinstance(model, TrainSettings):
            from .arguments import settings_for  # here, as a run that `galvatron train` starts has its settings

            settings = settings_for(model, args, sample_length(train_dataset))
        elif args is None:
            settings = model
        else:
            raise UserError("args: settings of a whole run say everything already; leave args out")
        plan, shape = settings.load_plan()
        self.data: BatchSource
        if train_dataset is None:
            self.data = open_data(settings, plan, shape)
        elif settings.input_dir is not None:
            raise UserError("input_dir: names data beside train_dataset; give one")
        else:
            length, vocab_size = plan.assumed.seq_length or 0, shape.vocab_size
            self.data = MapData("train_dataset", train_dataset, length, vocab_size, plan.global_batch, data_collator)
        self._evaluation = Evaluation(settings, plan, shape, data_collator)
        if settings.evaluates != "no":
            require_evaluation_data(eval_dataset, own_training_data=train_dataset is not None)
            self._evaluation_sources(eval_dataset)
        steps, self._epoch_steps = settings.steps_over(self.data.samples, plan.global_batch)
        settings = settings.over(steps)
        if settings.lora_rate_scale != 1:  # MultiTensorAdamW knows one rate alone
            settings = settings.model_copy(update={"use_multi_tensor": False})
        self.settings = settings
        initial = initial_weights(settings, shape)
        self.engine = Engine(
            plan,
            shape,
            load_family(shape.family),
            plan.assumed.seq_length or 0,
            source=initial.source,
            seed=settings.seed,
            compute_precision=settings.compute_precision,
            packed=settings.effective_packing != "none",
            adapters=initial.adapters,
            preference=settings.preference,
        )
        self._reference = Reference(self.engine, settings.output_dir, initial.base) if settings.compares else None
        if settings.lora_rate_scale != 1:
            set_rates(self.engine, settings.lora_rate_scale)
        optimizer = settings.build(self.engine.tensors, self.engine.decaying)
        self._events: list[Event] = []  # of traced steps
        self._plan_id = plan_id(plan)
        self._nonfinite = settings.nonfinite_guard(scaled=self.engine.scaler is not None)
        group = PlanGroup(plan, self.engine.rank, self.engine.groups)
        group.uninstall()  # PaddleNLP's Trainer asks while it is made, which another run's plan may refuse
        self.args: RunArguments
        self.control: Any
        settings.make_output_dir()  # or PaddleNLP does, and its name may not last
        super().__init__(
            LocalModel(self.engine.stage),
            args=run_arguments(settings, steps, plan.assumed.mixed_precision, args),
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            tokenizer=tokenizer,
            callbacks=[SyncParallelInfo(plan, group), *(callbacks or ())],
            optimizers=(optimizer, schedule_of(optimizer)),
        )
        self.callback_handler.train_dataloader = self.get_train_dataloader()
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(steps / self._epoch_steps)
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        refuse_overrides(cls)

    def _wrap_amp_model(self, *_: Any) -> None:
        """The engine has cast its weights by itself."""

    def print_config(self, *_: Any, **__: Any) -> None:
        """The settings' file has it."""

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end.

        `resume_from_checkpoint`: a checkpoint's folder; True: the newest whole one of the run, if any; False: from the
        beginning; None: as the settings say. `ignore_keys_for_eval` has nothing to do here. Raises GalvatronError.
        """
        if resume_from_checkpoint is not None:
            from_words = {True: "auto", False: "none"}
            wanted = from_words.get(resume_from_checkpoint, str(resume_from_checkpoint))  # type: ignore[arg-type]
            self.settings = self.settings.model_copy(update={"resume_from_checkpoint": wanted})
        start, losses = time.time(), dict[int, float]()
        self.is_in_train = True
        alone = self.settings.folder_locked(wait_s=RESTART_S) if self.engine.rank == 0 else nullcontext()
        with alone, closing(StepLog(self.settings.log)) as log:
            for record in self.steps():
                losses[record["step"]] = record["loss"]
                if self.engine.rank == 0:
                    log.write(record)
        self.is_in_train = False
        samples = len(losses) * self.engine.plan.global_batch
        metrics = speed_metrics("train", start, samples, len(losses), self.engine.seq_length)
        metrics["train_loss"] = sum(losses.values()) / max(1, len(losses))
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def steps(self) -> Iterator[StepRecord]:
        """Train, giving the record of every step, before a checkpoint is written of it, and again where an epoch's end
        behind that adds to it. Raises GalvatronError.

        The events that callbacks hear come in PaddleNLP's order. As in its pipeline, the micro-batches of a step run
        together, when the last one is loaded.
        """
        state, handler, settings = self.state, self.callback_handler, self.settings
        self._tell_reference()
        first = saved = state.global_step = resume(settings, self.engine, self.optimizer, self.data)
        self._best = self._best_so_far(first)
        if first >= state.max_steps:
            print_rank_0(self.engine, settings.nothing_to_do(first))
        model = _model_folder(settings)
        beside = {CONFIG: model / CONFIG, **companions(model)} if model else {}
        writer = Writer(settings.checkpoints, self.engine, settings.save_total_limit, self.data, beside, settings.log)
        self._unlogged: list[StepRecord] = []
        self._logged_at, self._step_began = time.time(), time.perf_counter()
        state.epoch = first / self._epoch_steps
        self.control = handler.on_train_begin(self.args, state, self.control)
        own = prefetch(lambda step: self.data.rows(step, self.engine.rows), range(first, state.max_steps))
        with told_to_stop() as told, closing(own):
            while state.global_step < state.max_steps and not self.control.should_training_stop:
                if state.global_step == first or state.global_step % self._epoch_steps == 0:
                    self.control = handler.on_epoch_begin(self.args, state, self.control)
                with self._traced(state.global_step):
                    record, stops = self._step(state.global_step, own, told, first=state.global_step == first)
                state.global_step += 1
                state.epoch = state.global_step / self._epoch_steps
                state.consumed_samples = self.data.first_sample(state.global_step)
                self._unlogged.append(record)
                self.control = handler.on_step_end(self.args, state, self.control)
                if stops and state.global_step < state.max_steps:
                    sys.stderr.write(f"{STOPPED} step {state.global_step} of {state.max_steps}\n")
                self.control.should_training_stop |= stops or state.global_step == state.max_steps
                self._require_whole_epochs()
                self._log_and_evaluate(record)
                ends = self.control.should_training_stop or state.global_step % self._epoch_steps == 0
                due = self.control.should_save or stops
                if ends and not due:  # the record has what is evaluated then; else the checkpoint goes first
                    due |= self._end_epoch(record)
                    ends = False
                yield record
                if due and self._nonfinite.advanced:
                    saved = self._save(writer)
                if ends:
                    told_before = len(record)
                    due = self._end_epoch(record)
                    if len(record) > told_before:
                        yield record
                    if due and self._nonfinite.advanced:
                        saved = self._save(writer)
            self.engine.wait_for_updates()
            self._nonfinite.require_progress()
            if settings.saves and saved != state.global_step:
                self._save(writer)
            writer.finish()
            self._take_best()

    def _tell_reference(self) -> None:
        """While the weights are those that the run begins with: of all data that the run knows."""
        if self._reference is None:
            return
        sources = [self.data]
        if self.settings.evaluates != "no":
            sources += [source for _, source in self._evaluation_sources(self.eval_dataset)]
        for source in sources:
            if isinstance(source, TuningData):
                self._reference.tell(source)
        self._reference.is_gone = self.engine.adapters is None

    def _best_so_far(self, step: int) -> Best | None:
        metric, greater = self.settings.best_metric, self.settings.greater_is_better
        if metric is None:
            return None
        return Best(self.settings.output_dir, metric, metric not in SMALLER if greater is None else greater, step)

    def _take_best(self) -> None:
        """At the end: the weights that evaluated best."""
        best = self._best
        if best is None or best.step in (None, self.engine.steps_done):
            return
        folder = checkpoint_of(self.settings.output_dir, best.step)
        print_rank_0(self.engine, f"saved {folder} is the best: {self.settings.best_metric} {best.value:.4f}")
        load(open_checkpoint(folder, self.engine.shape), self.engine, self.optimizer)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and perplexity of `eval_dataset`, else of the trainer's, else of the run's validation split, or of their
        first batches. With a dict of data sets, keys have their names. Raises UserError."""
        metrics: dict[str, float] = {}
        for name, source in self._evaluation_sources(self.eval_dataset if eval_dataset is None else eval_dataset):
            metrics |= self._evaluate(source, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        return metrics

    def _evaluation_sources(self, dataset: Any) -> list[tuple[str, BatchSource]]:
        require_evaluation_data(dataset, own_training_data=isinstance(self.data, MapData))
        if isinstance(dataset, dict):
            return [(name, self._evaluation.open(one, f"eval_dataset {name}")) for name, one in dataset.items()]
        return [("", self._evaluation.open(dataset))]

    def _evaluate(self, source: BatchSource, prefix: str) -> dict[str, float]:
        start, engine, handler = time.time(), self.engine, self.callback_handler
        count, rows = self._evaluation.steps(source), source.pass_rows
        handler.eval_dataloader = loader(rows, count, engine.plan, self.args)

        def tell() -> None:
            self.control = handler.on_prediction_step(self.args, self.state, self.control)

        if self._reference is not None and isinstance(source, TuningData):
            self._reference.tell(source)
        means = mean_metrics(engine, rows, count, tell)
        if self.settings.preference is None:
            means["ppl"] = math.exp(min(means["loss"], LARGEST_EXPONENT))
        metrics = {f"{prefix}_{name}": mean for name, mean in means.items()}
        metrics |= speed_metrics(prefix, start, count * engine.plan.global_batch, count)
        self.log(dict(metrics))
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._step_began = time.perf_counter()
        return metrics

    def get_train_dataloader(self) -> DataLoader:
        """Batches that PaddleNLP's trainer would load on this rank in the first pass: dicts of input_ids and labels,
        each [per_device_train_batch_size, sequence], a micro-batch after the other. Training itself takes other rows:
        those that the plan's engine computes on."""
        return loader(self.data.rows, self._epoch_steps, self.engine.plan, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches that PaddleNLP's trainer would load on this rank in an evaluation. Raises UserError."""
        sources = self._evaluation_sources(self.eval_dataset if eval_dataset is None else eval_dataset)
        if len(sources) > 1:
            raise UserError("eval_dataset: a dict of data sets has no single loader; name one of its keys' data sets")
        [(_, source)] = sources
        return loader(source.pass_rows, self._evaluation.steps(source), self.engine.plan, self.args)

    def save_model(self, output_dir: str | Path | None = None, merge_tensor_parallel: bool = True) -> None:
        """Write the whole model, gathered from all ranks, which all call this: a Hugging Face directory, that PaddleNLP
        loads too. Default: args.output_dir. It is merged, whatever `merge_tensor_parallel`. Raises GalvatronError."""
        target = Path(self.args.output_dir if output_dir is None else output_dir)
        save_model(self.engine, target, _model_folder(self.settings), self.tokenizer)

    def _end_epoch(self, record: StepRecord) -> bool:
        """Let callbacks hear of it; returns whether they want a checkpoint."""
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_and_evaluate(record)
        return bool(self.control.should_save)

    def _log_and_evaluate(self, record: StepRecord) -> None:
        if self.control.should_log and self._unlogged:
            self._log_interval()
        if self.control.should_evaluate:
            metrics = self.evaluate()
            shown = {name: value for name, value in metrics.items() if not name.endswith(SPEEDS)}
            values = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
            print_rank_0(self.engine, f"{EVALUATED} step {self.state.global_step}: {values}")
            record["eval_loss"] = next(value for key, value in metrics.items() if key.endswith("_loss"))
            told = ("accuracy", *METRICS)
            record["eval_metrics"] = {name: metrics[f"eval_{name}"] for name in told if f"eval_{name}" in metrics}
            if self._best:
                self._best.evaluated(self.state.global_step, metrics)

    def _require_whole_epochs(self) -> None:
        """Raise UserError when a callback wants to leave an epoch early, which the order of samples does not know."""
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise UserError(
                "should_epoch_stop: an epoch cannot end early, as one order of samples runs through all; set "
                "should_training_stop to end the run"
            )

    def _step(self, step: int, own: Iterator[Batch], told: list[int], first: bool) -> tuple[StepRecord, bool]:
        """Runs one step on the next of this rank's `own` rows; returns its record, and whether any rank is to stop.

        Its time is from the end of the step before, or of what came in between, a checkpoint or an evaluation, to its
        own end: when the device has computed all of it.
        """
        engine, handler = self.engine, self.callback_handler
        loading, count = time.perf_counter(), engine.plan.micro_batches
        with span("data", "data"):
            batch = next(own)
        data_s = time.perf_counter() - loading
        share = engine.share(batch)
        for micro_batch in range(count):
            if self._tells_data:  # by PaddleNLP's division, which is not that of the plan's engine
                inputs = inputs_of(self.data.rows, step, micro_batch, engine.plan, self.args)
                handler.on_load_data_end(self.args, self.state, self.control, inputs=inputs)
            if micro_batch == 0:
                self.control = handler.on_step_begin(self.args, self.state, self.control)
            if micro_batch < count - 1:
                self.control = handler.on_substep_end(self.args, self.state, self.control)
        device.reset_peak()
        forget_traffic()
        loss = engine.forward_backward(share)
        handler.on_optimizer_begin(self.args, self.state, self.control, scaler=engine.scaler)
        with span("optimizer", "optimizer"):
            norm = engine.update(self.optimizer, self.settings.max_grad_norm)
        if self._read_by_others:
            engine.wait_for_updates()
        self._nonfinite.count(step, loss, norm)
        next_rate(self.optimizer)
        handler.on_optimizer_end(self.args, self.state, self.control, scaler=engine.scaler)
        device.finish_computing()  # zero2's all-gather overlaps the next step
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        if first:
            traffic = engine.traffic()
            if engine.rank == 0:
                write_text(self.settings.traffic, json.dumps(traffic, indent=2) + "\n")
        # One rank may hear of SIGTERM a step before another.
        numbers = seconds, data_s, device.peak_mib(), bool(told), *engine.stage.load.imbalance
        times, loads, peaks, stops, *imbalance = engine.gather(*numbers)
        record = StepRecord(
            step=step,
            loss=loss,
            lr=self.settings.rate_at(step),
            grad_norm=norm,
            step_time_s=max(times),
            data_s=max(loads),
            tokens_per_s=engine.seq_length * engine.plan.global_batch / max(times),
            plan=self._plan_id,
            peak_memory_mib=told_peaks(peaks, engine.plan.pipeline),
            peak_memory_rank=peaks.index(max(peaks)),
        )
        if isinstance(self.data, TuningData):
            record["target_tokens_per_s"] = share.labelled / max(times)
            record["filled"] = self.data.filled(step)
        if any(imbalance[0]):
            told_of = [one for one in imbalance[0] if one]
            record["moe_imbalance"] = sum(told_of) / len(told_of)
            record["moe_imbalance_most"] = max(imbalance[1])
        if self.engine.metrics:
            record["metrics"] = self.engine.metrics
        return record, any(stops)

    @property
    def _read_by_others(self) -> bool:
        """Whether there are callbacks that PaddleNLP did not bring: they may read weights."""
        kinds = {type(each) for each in self.callback_handler.callbacks} - {SyncParallelInfo}
        return any(not kind.__module__.startswith("paddlenlp.") for kind in kinds)

    @property
    def _tells_data(self) -> bool:
        """Whether a callback hears of what is loaded."""
        silent = TrainerCallback.on_load_data_end
        return any(type(each).on_load_data_end is not silent for each in self.callback_handler.callbacks)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """The time line of a step, if it is among those that are traced; the file has all of them so far."""
        engine, settings = self.engine, self.settings
        if step not in settings.traced_steps:
            yield
            return
        with traced(engine.rank, self._events), span(f"step {step}", "step"):
            yield
        write_events(settings.traced_by(engine.rank), self._events)
        engine.gather(0.0)  # all have written
        if engine.rank == 0:
            join_traces(settings.traced, [settings.traced_by(rank) for rank in range(engine.plan.world_size)])

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
        if "moe_imbalance" in records[-1]:
            logs["moe_imbalance"] = sum(record["moe_imbalance"] for record in records) / len(records)
        told = [record["metrics"] for record in records if "metrics" in record]
        logs |= {name: sum(one[name] for one in told) / len(told) for name in (told[0] if told else ())}
        logs |= speed_metrics("interval", self._logged_at, samples, len(records), self.engine.seq_length)
        self._logged_at = time.time()
        self.log(logs)

    def _save(self, writer: Writer) -> int:
        if self._best:
            self._best.saves(self.engine.steps_done, write=self.engine.rank == 0)
            self.state.best_metric = self._best.value if self._best.step else None
        writer.save(self.optimizer, self._best.step if self._best else None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self._step_began = time.perf_counter()
        return int(self.state.global_step)


def _model_folder(settings: TrainSettings) -> Path | None:
    """The model's own folder, whose files turn a checkpoint into a Hugging Face model again."""
    folder = Path(settings.model)
    folder = folder.parent if folder.name == CONFIG else folder
    return folder if (folder / CONFIG).is_file() else None
