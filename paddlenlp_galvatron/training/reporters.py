"""Writes a run's logs to the rank's own log, VisualDL, TensorBoard and Weights & Biases, under PaddleNLP's names."""

from __future__ import annotations

import os
import socket
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .settings import REPORTERS, TrainSettings, require_reporters

SPLITS = ("eval_", "test_")  # a metric's prefix -> its group; all others are in `train`
WRITERS = {"tensorboard": ("SummaryWriter", "log_dir"), "visualdl": ("LogWriter", "logdir")}


class Reporters:
    """The programs in `report_to`; unset: VisualDL where it is installed, as PaddleNLP does."""

    def __init__(self, settings: TrainSettings):
        """Raises UserError for one that is not installed."""
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
    split = next((split for split in SPLITS if name.startswith(split)), None)
    return f"{split[:-1]}/{name.removeprefix(split)}" if split else f"train/{name}"


def _writer(name: str, folder: Path, settings: TrainSettings) -> Any:
    """One that has add_scalar(name, value, step), or Weights & Biases' run."""
    module = import_module(REPORTERS[name])
    if name in WRITERS:
        kind, where = WRITERS[name]
        return getattr(module, kind)(**{where: str(folder)})
    project = os.environ.get("WANDB_PROJECT", "PaddleNLP")
    return module.init(project=project, dir=str(settings.output_dir), config=settings.model_dump(mode="json"))
