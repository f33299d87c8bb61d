"""PaddleNLP's Trainer on the training loop: callbacks receive the loop's events and decide the actions due. A user's
data set is any object with a length and items by number, as for PaddleNLP's Trainer."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.trainer_utils import TrainOutput

from ...base.errors import UserError
from ...plan import ModelShape, Plan
from ...runtime.batch import IGNORED_LABEL, Samples
from ...runtime.paddle_private import schedule_of, uninstall_group
from ..checkpoint.saving import save_model
from ..data.source import BatchSource, InPasses
from ..events import Events
from ..inputs import Sources, open_data, open_validation
from ..loop import TrainingLoop
from ..run import RankRun
from ..settings import TrainSettings
from ..step_log import StepRecord
from .surface import (
    LocalModel,
    PlanGroup,
    RunArguments,
    SyncParallelInfo,
    inputs_of,
    refuse_arguments,
    refuse_overrides,
    run_arguments,
    without_unsupported,
)

Tokens = NDArray[np.int64]
Collator = Callable[[list[Any]], Mapping[str, Any]]
KEYS = {"input_ids", "labels", "attention_mask"}
WHOLE = "text"  # name of inputs and labels together in PaddleNLP's pretraining data sets


class MapData(InPasses):
    """Global batches of a map-style data set, in the order of `InPasses`."""

    def __init__(
        self,
        name: str,
        dataset: Any,
        seq_length: int,
        vocab_size: int,
        global_batch: int,
        collator: Collator | None = None,
        shuffle: bool = True,
    ):
        """`name`: of the argument, for errors. `collator`: makes a batch of items, as PaddleNLP's data_collator.
        Raises UserError if it has no length or no items."""
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"{name}: a {type(dataset).__name__} has no length or no items by number; give a map-style data set "
                "(len(dataset) and dataset[number])"
            )
        if not len(dataset):
            raise UserError(f"{name}: is empty")
        super().__init__(
            global_batch,
            {"data": f"{name} {type(dataset).__name__} of {len(dataset)}", "seq_length": seq_length},
            shuffle,
        )
        self._name, self._dataset, self._collator = name, dataset, collator
        self._seq_length, self._vocab_size = seq_length, vocab_size

    @property
    def samples(self) -> int:
        return len(self._dataset)

    def _batch(self, indices: Sequence[int]) -> Samples:
        """Raises UserError for invalid tokens."""
        if not indices:
            nothing = np.empty((0, self._seq_length), np.int64)
            return Samples(nothing, nothing)
        items = [self._dataset[index] for index in indices]
        if self._collator is None:
            rows = [
                self._row(item, f"{self._name}[{index}]", self._seq_length)
                for index, item in zip(indices, items, strict=True)
            ]
            return Samples(*map(np.stack, zip(*rows, strict=True)))
        where = f"data_collator, of {self._name}[{indices[0]}] and others"
        return Samples(*self._row(self._collator(items), where, len(items), self._seq_length))

    def _row(self, item: Any, where: str, *shape: int) -> tuple[Tokens, Tokens]:
        """Inputs and labels of a sample [S], or of a collated batch [samples, S]. Raises UserError."""
        fields = dict(item) if isinstance(item, Mapping) else {WHOLE: item}
        unknown = sorted(fields.keys() - KEYS - {WHOLE})
        if unknown:
            raise UserError(
                f"{where}: has {', '.join(unknown)}, which the plan's engine does not take; give input_ids and "
                "labels alone"
            )
        name = next((key for key in ("input_ids", WHOLE) if key in fields), None)
        if name is None:
            raise UserError(f"{where}: input_ids are missing; it has {', '.join(fields) or 'nothing'}")
        ids = _integers(fields[name], f"{where}: {name}")
        length = shape[-1]
        if "labels" in fields:
            labels = _integers(fields["labels"], f"{where}: labels")
        elif ids.shape == (*shape[:-1], length + 1):
            ids, labels = ids[..., :-1], ids[..., 1:]
        else:  # the last token predicts nothing
            end = np.full((*ids.shape[:-1], 1), IGNORED_LABEL)
            labels = np.concatenate([ids[..., 1:], end], axis=-1) if ids.ndim == len(shape) else ids
        for key, tokens in ((name, ids), ("labels", labels)):
            if tokens.shape != shape:
                raise UserError(
                    f"{where}: {key} has shape {tokens.shape} instead of {shape}; a sample has {length} tokens, or "
                    f"{length + 1} where it brings no labels"
                )
        self._require_tokens(ids, labels, where)
        if "attention_mask" in fields:
            _require_causal(fields["attention_mask"], labels, where)
        return ids, labels

    def _require_tokens(self, ids: Tokens, labels: Tokens, where: str) -> None:
        """Raise UserError for an id that is no token of the model."""
        learnt = labels[labels != IGNORED_LABEL]
        for key, tokens in (("input_ids", ids), ("labels", learnt)):
            wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if wrong.size:
                raise UserError(f"{where}: {key} has token {wrong[0]}, but the model's are 0-{self._vocab_size - 1}")


def sample_length(dataset: Any) -> int | None:
    """Sequence length of a data set by its first item; None: unknown."""
    try:
        item = dataset[0]
        if isinstance(item, Mapping):
            item = item["input_ids"] if "labels" in item else item.get("input_ids", item.get(WHOLE))[1:]
            return len(item)
        return len(item) - 1
    except (TypeError, KeyError, IndexError):
        return None


def _integers(value: Any, where: str) -> Tokens:
    """Raises UserError."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{where}: is no array of integers")
    return array.astype(np.int64)


def _require_causal(mask: Any, labels: Tokens, where: str) -> None:
    """Raise UserError for a mask that is more than padding at the end, without labels: attention is causal anyway."""
    shown = _integers(mask, f"{where}: attention_mask")
    padded = shown == 0
    at_end = shown.shape == labels.shape and not (np.diff(padded.astype(np.int8), axis=-1) < 0).any()
    if not at_end or (labels[padded] != IGNORED_LABEL).any():
        raise UserError(
            f"{where}: attention_mask hides tokens that are no padding at the end with the label {IGNORED_LABEL}; "
            "attention "
            "is causal over the whole sample: leave the mask out"
        )


@without_unsupported
class GalvatronTrainer(Trainer):  # type: ignore[misc]
    """Trains by a plan. Every rank of the world constructs it with equal arguments and calls `train`."""

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
        """Takes the keywords of PaddleNLP's Trainer.

        `model`: a preset's name, a Hugging Face directory, a config.json or PaddleNLP's config; or, without `args`,
        the settings of a whole run. `args`: GalvatronTrainingArguments, which name the plan. `train_dataset`:
        map-style, its items tokens or dicts of input_ids and labels; without, the data that settings name.
        `eval_dataset`: the same, or a dict of several. `tokenizer`: is saved with the model. Raises UserError, for
        other arguments of PaddleNLP, too.
        """
        refuse_arguments(others)
        self._own_data, self.eval_dataset, self.data_collator = train_dataset, eval_dataset, data_collator
        self.run = RankRun.of(_settings(model, args, train_dataset), self._open_training, self._open_evaluation)
        self.run.tokenizer = tokenizer
        self.loop = TrainingLoop(self.run, Callbacks(self))
        engine, settings, steps = self.run.engine, self.run.settings, self.run.steps
        group = PlanGroup(engine.plan, engine.rank)
        uninstall_group()  # PaddleNLP's constructor uses the group, and another run's plan may refuse that
        self.args: RunArguments
        self.control: Any
        settings.make_output_dir()  # PaddleNLP's own directory might not be written to disk
        super().__init__(
            LocalModel(engine.stage),
            args=run_arguments(settings, steps, engine.plan.assumed.mixed_precision, args),
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            tokenizer=tokenizer,
            callbacks=[SyncParallelInfo(engine.plan, group), *(callbacks or ())],
            optimizers=(self.run.optimizer, schedule_of(self.run.optimizer)),
        )
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(steps / self.run.epoch_steps)
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        refuse_overrides(cls)

    def _open_training(self, settings: TrainSettings, plan: Plan, shape: ModelShape) -> BatchSource:
        if self._own_data is None:
            return open_data(settings, plan, shape)
        if settings.input_dir is not None:
            raise UserError("input_dir: given together with train_dataset; give one")
        return self._map_data("train_dataset", self._own_data, plan, shape, shuffle=True)

    def _open_evaluation(
        self, settings: TrainSettings, plan: Plan, shape: ModelShape, data_sets: Any = None
    ) -> Sources:
        """`data_sets`: the user's; None: those of the constructor, else the validation split."""
        data = self.eval_dataset if data_sets is None else data_sets
        if data is None and self._own_data is not None:
            raise UserError("eval_dataset: missing; training is on a train_dataset, which has no validation split")
        if data is None:
            return open_validation(settings, plan, shape)
        if isinstance(data, dict) and data:
            return [
                (name, self._map_data(f"eval_dataset {name}", data_set, plan, shape)) for name, data_set in data.items()
            ]
        return [("", self._map_data("eval_dataset", data, plan, shape))]

    def _map_data(self, name: str, data: Any, plan: Plan, shape: ModelShape, shuffle: bool = False) -> MapData:
        length = plan.assumed.seq_length or 0
        return MapData(name, data, length, shape.vocab_size, plan.global_batch, self.data_collator, shuffle)

    def _sources(self, data_sets: Any = None) -> Sources:
        """The data of an evaluation. Raises UserError."""
        if data_sets is None:
            return self.run.evaluation()
        return self._open_evaluation(self.run.settings, self.run.engine.plan, self.run.engine.shape, data_sets)

    def _wrap_amp_model(self, *_: Any) -> None:
        """Does nothing: the engine has cast its weights."""

    def print_config(self, *_: Any, **__: Any) -> None:
        """Does nothing: the settings' file has them."""

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end.

        `resume_from_checkpoint`: a checkpoint's folder; True: the newest whole one of the run, if any; False: from the
        beginning; None: as the settings say. `ignore_keys_for_eval` has no effect. Raises GalvatronError.
        """
        if resume_from_checkpoint is not None:
            from_words = {True: "auto", False: "none"}
            wanted = from_words.get(resume_from_checkpoint, str(resume_from_checkpoint))  # type: ignore[arg-type]
            self.run.settings = self.run.settings.model_copy(update={"resume_from_checkpoint": wanted})
        start, self.is_in_train = time.time(), True
        losses = [record["loss"] for record in self.steps()]
        self.is_in_train = False
        metrics = self.run.speeds("train", start, len(losses))
        metrics["train_loss"] = sum(losses) / max(1, len(losses))
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def steps(self) -> Iterator[StepRecord]:
        """Train and yield the record of every step. Raises GalvatronError."""
        return self.loop.steps()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and perplexity of `eval_dataset`, else of the trainer's, else of the run's validation split, or of their
        first batches. With a dict of data sets, keys have their names. Raises UserError."""
        return self.loop.evaluate(self._sources(eval_dataset), metric_key_prefix)

    def save_model(self, output_dir: str | Path | None = None, merge_tensor_parallel: bool = True) -> None:
        """Write the whole model, gathered from all ranks, which all call this: a Hugging Face directory, that PaddleNLP
        loads too. Default: args.output_dir. `merge_tensor_parallel` changes nothing. Raises GalvatronError."""
        target = Path(self.args.output_dir if output_dir is None else output_dir)
        save_model(self.run.engine, target, self.run.origin)


class Callbacks(Events):
    """Calls PaddleNLP's callbacks in the order of its trainer. As in its pipeline, the micro-batches of a step run
    together after the last is loaded."""

    def __init__(self, trainer: GalvatronTrainer):
        self._trainer = trainer

    @property
    def control(self) -> Any:
        return self._trainer.control

    def _call(self, event: str, **arguments: Any) -> None:
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control, **arguments)

    def _reached(self, step: int) -> None:
        run, state = self._trainer.run, self._trainer.state
        state.global_step, state.epoch = step, step / run.epoch_steps
        state.consumed_samples = run.data.first_sample(step)

    def on_train_begin(self, step: int) -> None:
        self._reached(step)
        self._call("on_train_begin")

    def on_epoch_begin(self) -> None:
        self._call("on_epoch_begin")

    def on_step_begin(self, step: int) -> None:
        trainer, plan = self._trainer, self._trainer.run.engine.plan
        for micro_batch in range(plan.micro_batches):
            if self._shows_data:  # micro-batches as PaddleNLP divides them, not as the engine does
                inputs = inputs_of(trainer.run.data.rows, step, micro_batch, plan, trainer.args)
                self._call("on_load_data_end", inputs=inputs)
            if micro_batch == 0:
                self._call("on_step_begin")
            if micro_batch < plan.micro_batches - 1:
                self._call("on_substep_end")

    def on_optimizer_begin(self) -> None:
        self._call("on_optimizer_begin", scaler=self._trainer.run.engine.scaler)

    def on_optimizer_end(self) -> None:
        if self._has_others:  # callbacks may read weights
            self._trainer.run.engine.wait_for_updates()
        self._call("on_optimizer_end", scaler=self._trainer.run.engine.scaler)

    def on_step_end(self, step: int) -> None:
        """Raises UserError if a callback asks to end an epoch early, which the order of samples does not support."""
        self._reached(step)
        self._call("on_step_end")
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise UserError(
                "should_epoch_stop: an epoch cannot end early, as one order of samples runs through all; set "
                "should_training_stop to end the run"
            )

    def on_epoch_end(self) -> None:
        self._call("on_epoch_end")

    def on_log(self, logs: dict[str, float]) -> None:
        self._trainer.log(logs)

    def on_prediction_step(self) -> None:
        self._call("on_prediction_step")

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        self._call("on_evaluate", metrics=metrics)

    def on_save(self, best: float | None) -> None:
        self._trainer.state.best_metric = best
        self._call("on_save")

    @property
    def _has_others(self) -> bool:
        """Whether there are callbacks beyond PaddleNLP's."""
        kinds = {type(each) for each in self._trainer.callback_handler.callbacks} - {SyncParallelInfo}
        return any(not kind.__module__.startswith("paddlenlp.") for kind in kinds)

    @property
    def _shows_data(self) -> bool:
        """Whether a callback reads the loaded data."""
        silent = TrainerCallback.on_load_data_end
        return any(type(each).on_load_data_end is not silent for each in self._trainer.callback_handler.callbacks)


def _settings(model: Any, args: TrainingArguments | None, train_dataset: Any) -> TrainSettings:
    """The run of a trainer. Raises UserError."""
    if not isinstance(model, TrainSettings):
        from .arguments import settings_for  # here: runs of `galvatron train` have their settings

        return settings_for(model, args, sample_length(train_dataset))
    if args is not None:
        raise UserError("args: settings of a whole run say everything already; leave args out")
    return model
