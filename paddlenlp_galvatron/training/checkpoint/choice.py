"""Which checkpoint a path means: itself, or one of the run whose folder it is. And which one of a run is its best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from ...base.errors import UserError
from ...base.reading import read_json
from ...base.writing import write_text
from .stored import step_of, whole_checkpoints

BEST = "best.json"  # of a run: {"step": …, "metric": …, "value": …}
SMALLER = ("loss", "ppl")  # metrics that are better where they are smaller


def checkpoint_of(path: Path, iteration: int | None = None, newest: bool = False) -> Path:
    """The checkpoint of `iteration` steps, or the best, or the newest where a run has no best one, if `path` is a run's
    folder or its checkpoints'; else `path` itself. Raises UserError: there is none of so many steps."""
    there = whole_checkpoints(path / "checkpoints") or whole_checkpoints(path)
    if not there and not iteration:  # 0 is Galvatron's word for any
        return path
    if iteration is None:
        best = None if newest else best_step(path)
        return next((folder for folder in there if step_of(folder) == best), there[0])
    for folder in (*there, path):
        if folder.name[:13] == f"step-{iteration:08d}":
            return folder
    steps = ", ".join(str(int(folder.name[5:13])) for folder in reversed(there))
    known = f"there are {steps}" if there else "it is no run's folder"
    raise UserError(f"load_iteration: {path} has no checkpoint of {iteration} steps: {known}")


def best_step(run: Path) -> int | None:
    """Steps of a run's best checkpoint; None: it told of none."""
    content = read_json(run / BEST) if (run / BEST).exists() else {}
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int else None


class Best:
    """Which checkpoint of a run was best, of those that were evaluated; kept beside them."""

    def __init__(self, run: Path, metric: str, greater: bool, begins_at: int):
        """A best one behind the step at which a run begins is of a run that it goes back behind."""
        self._run, self._metric, self._greater = run, metric, greater
        self._evaluated: tuple[int, float] | None = None
        self.step: int | None = None
        self.value = -math.inf if greater else math.inf
        content = read_json(run / BEST) if (run / BEST).exists() else None
        known = content if isinstance(content, dict) and content.get("metric") == metric else {}
        step, value = known.get("step"), known.get("value")
        if type(step) is int and step <= begins_at and type(value) in (int, float):
            self.step, self.value = step, float(str(value))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """After so many steps."""
        self._evaluated = step, metrics[f"eval_{self._metric}"]

    def saves(self, step: int, write: bool) -> None:
        """A checkpoint is about to be written of so many steps; `write`: whether this rank keeps what is best."""
        at, value = self._evaluated or (-1, math.nan)
        if at == step and (value > self.value if self._greater else value < self.value):
            self.step, self.value = step, value
            if write:
                told = {"step": step, "metric": self._metric, "value": value}
                write_text(self._run / BEST, json.dumps(told) + "\n")
