"""Steps without a finite loss and gradients: which may be left out, and when a run that leaves them out ends."""

from __future__ import annotations

import math
import sys
from collections import deque

from ..plan import GalvatronError
from .settings import TrainSettings


class NonFiniteGuard:
    """Counts the steps of this process that were left out."""

    def __init__(self, settings: TrainSettings, scaled: bool):
        """`scaled`: fp16's gradients overflow now and then until the loss scale fits; the loss itself does not."""
        self._may_skip = settings.on_nonfinite == "skip"
        self._most, self._scaled = settings.max_skipped, scaled
        self._latest: deque[bool] = deque(maxlen=max(1, 2 * self._most))  # whether each step was left out
        self.advanced = False  # whether any step changed the weights
        self._told_of_zero = False

    def count(self, step: int, loss: float, norm: float) -> None:
        """Take note of a step. Raises GalvatronError where it may not be left out, or too many were."""
        skipped = not math.isfinite(norm)
        if skipped and not self._may_skip and not (self._scaled and math.isfinite(loss)):
            raise GalvatronError(
                f"step {step}: the loss is {loss}, the norm of the gradients {norm}; lower learning_rate, look at the "
                "data of this step, or pass --on_nonfinite skip to leave such steps out"
            )
        if norm == 0.0 and not self._told_of_zero:
            self._told_of_zero = True
            sys.stderr.write(
                f"warning: step {step}: the norm of the gradients is exactly 0, so nothing is trained; lower "
                "learning_rate and go on from an earlier checkpoint, or look at the data\n"
            )
        self._latest.append(skipped)
        self.advanced |= not skipped
        if (count := sum(self._latest)) > self._most:
            raise GalvatronError(
                f"step {step}: {count} of the latest {len(self._latest)} steps were left out, more than --max_skipped "
                f"{self._most}: the loss is {loss}, the norm of the gradients {norm}; lower learning_rate, look at the "
                "data, or go on from an earlier checkpoint"
            )

    def require_progress(self) -> None:
        """Raise GalvatronError where all steps were left out."""
        if self._latest and not self.advanced:
            raise GalvatronError(
                f"all {len(self._latest)} steps were left out, their loss or gradients being NaN or Inf: nothing was "
                "trained, and no checkpoint is written; lower learning_rate, or look at the data"
            )
