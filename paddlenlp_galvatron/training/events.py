"""The events of the training loop, and the actions that are due after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .data.source import BatchSource
from .reporters import Reporters
from .settings import TrainSettings


@dataclass
class Control:
    """The actions that are due, by the names of PaddleNLP's TrainerControl."""

    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_training_stop: bool = False


class Events:
    """Announced on every rank. Here actions are due by the settings' intervals; a subclass may decide otherwise."""

    control: Any  # Control, or one with its fields

    def __init__(self, settings: TrainSettings, is_first_rank: bool = False):
        """`is_first_rank`: whether this rank reports."""
        self._settings, self._step, self.control = settings, 0, Control()
        self._reporters = Reporters(settings) if is_first_rank else None

    def on_train_begin(self, step: int) -> None:
        """`step`: steps that are done, counted from 0 wherever the run began."""
        self._step = step

    def on_epoch_begin(self) -> None:
        """Before its first step, and where the run resumes."""

    def on_step_begin(self, step: int) -> None:
        """The batch is loaded."""

    def on_optimizer_begin(self) -> None:
        """Gradients are there."""

    def on_optimizer_end(self) -> None:
        """Weights are updated, but may not be gathered."""

    def on_step_end(self, step: int) -> None:
        """`step`: steps that are done, this one too."""
        self._step, settings, control = step, self._settings, self.control
        control.should_log = step % settings.logging_steps == 0 or (step == 1 and settings.logging_first_step)
        interval = settings.eval_steps or settings.logging_steps
        control.should_evaluate = settings.evaluates == "steps" and step % interval == 0
        by_steps = settings.save_strategy == "steps" and settings.save_steps > 0
        control.should_save = by_steps and step % settings.save_steps == 0

    def on_epoch_end(self) -> None:
        """Behind its last step, and where the run stops."""
        self.control.should_evaluate |= self._settings.evaluates == "epoch"
        self.control.should_save |= self._settings.save_strategy == "epoch"

    def on_log(self, logs: dict[str, float]) -> None:
        """Means since the last time, or metrics, by PaddleNLP's names."""
        self.control.should_log = False
        if self._reporters:
            self._reporters.write(logs, self._step)

    def on_evaluation_begin(self, source: BatchSource, batches: int) -> None:
        """Before the first of `batches` global batches."""

    def on_prediction_step(self) -> None:
        """A global batch is evaluated."""

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        """A data set is evaluated."""
        self.control.should_evaluate = False

    def on_save(self, best: float | None) -> None:
        """A checkpoint is on its way. `best`: the best metric of those that are kept."""
        self.control.should_save = False
