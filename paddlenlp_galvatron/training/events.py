"""The events of the training loop, the actions that are due after a step, and the receivers of logs."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .settings import REPORTERS, TrainSettings, require_reporters

SPLITS = ("eval", "test")  # a metric's prefix is its group; all others are in `train`
WRITERS = {"tensorboard": ("SummaryWriter", "log_dir"), "visualdl": ("LogWriter", "logdir")}


@dataclass
class Control:
    """The actions that are due, by the names of PaddleNLP's TrainerControl."""

    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_training_stop: bool = False


class Events:
    """Event handlers, called on every rank. Actions are due by the settings' intervals; a subclass may change that."""

    control: Any  # Control, or one with its fields

    def __init__(self, settings: TrainSettings, is_first_rank: bool = False):
        """`is_first_rank`: whether this rank reports."""
        self._settings, self._step, self.control = settings, 0, Control()
        self._reporters = Reporters(settings) if is_first_rank else None

    def on_train_begin(self, step: int) -> None:
        """`step`: finished steps, counted from 0 even in a resumed run."""
        self._step = step

    def on_epoch_begin(self) -> None:
        """Called before the first step, and when the run resumes."""

    def on_step_begin(self, step: int) -> None:
        """Called when the batch is loaded."""

    def on_optimizer_begin(self) -> None:
        """Called when gradients are complete."""

    def on_optimizer_end(self) -> None:
        """Called after the update; weights may not be gathered yet."""

    def on_step_end(self, step: int) -> None:
        """`step`: finished steps, including this step."""
        self._step, settings, control = step, self._settings, self.control
        control.should_log = step % settings.logging_steps == 0 or (step == 1 and settings.logging_first_step)
        interval = settings.eval_steps or settings.logging_steps
        control.should_evaluate = settings.evaluates == "steps" and step % interval == 0
        by_steps = settings.save_strategy == "steps" and settings.save_steps > 0
        control.should_save = by_steps and step % settings.save_steps == 0

    def on_epoch_end(self) -> None:
        """Called after the last step, and when the run stops."""
        self.control.should_evaluate |= self._settings.evaluates == "epoch"
        self.control.should_save |= self._settings.save_strategy == "epoch"

    def on_log(self, logs: dict[str, float]) -> None:
        """Means since the last time, or metrics, by PaddleNLP's names."""
        self.control.should_log = False
        if self._reporters:
            self._reporters.write(logs, self._step)

    def on_prediction_step(self) -> None:
        """Called after each evaluated global batch."""

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        """Called after each evaluated data set."""
        self.control.should_evaluate = False

    def on_save(self, best: float | None) -> None:
        """Called when a checkpoint is being written. `best`: the best metric of the kept checkpoints."""
        self.control.should_save = False


class Reporters:
    """Writes logs to the rank's own log and, under PaddleNLP's names, to the programs in `report_to`: VisualDL,
    TensorBoard, Weights & Biases. Unset: VisualDL where it is installed, as PaddleNLP does."""

    def __init__(self, settings: TrainSettings):
        """Raises UserError for a package that is not installed."""
        visualdl = ("visualdl",) if find_spec("visualdl") else ()
        self.names = visualdl if settings.report_to is None else settings.report_to
        require_reporters(self.names)
        default = settings.output_dir / "runs" / f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        self.folder = settings.logging_dir or default
        self._writers = [_writer(name, self.folder, settings) for name in self.names]

    def write(self, logs: dict[str, float], step: int) -> None:
        """Means or metrics after `step` steps."""
        sys.stderr.write(f"step {step}: {', '.join(f'{name} {value:.6g}' for name, value in logs.items())}\n")
        scalars = {_grouped(name): float(value) for name, value in logs.items()}
        for writer in self._writers:
            if hasattr(writer, "add_scalar"):
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)
                writer.flush()
            else:
                writer.log(scalars, step=step)


def _grouped(name: str) -> str:
    split, _, rest = name.partition("_")
    return f"{split}/{rest}" if split in SPLITS else f"train/{name}"


def _writer(name: str, folder: Path, settings: TrainSettings) -> Any:
    """One that has add_scalar(name, value, step), or Weights & Biases' run."""
    module = import_module(REPORTERS[name])
    if name in WRITERS:
        kind, where = WRITERS[name]
        return getattr(module, kind)(**{where: str(folder)})
    project = os.environ.get("WANDB_PROJECT", "PaddleNLP")
    return module.init(project=project, dir=str(settings.output_dir), config=settings.model_dump(mode="json"))
