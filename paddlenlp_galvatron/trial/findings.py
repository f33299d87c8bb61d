"""What a part of the check is given, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..launch.processes import Device

LAUNCH_S = 120.0  # of small models on GPUs: what takes longer hangs


class TrialState(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TOLD = "told"  # a figure that nothing judges
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class TrialFinding:
    """One line of the result."""

    part: str
    ranks: int
    name: str
    state: TrialState
    told: str  # the figure, the fault, or why it was left out
    seconds: float = 0.0


@dataclass(frozen=True)
class TrialSetting:
    """What a part runs on."""

    part: str
    ranks: int
    device: Device
    folder: Path  # for its logs, which stay
    end: float  # by the monotonic clock, of its time

    @property
    def on_gpus(self) -> bool:
        return self.device == "gpu"

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    @property
    def launch_s(self) -> float:
        """What a launch may take. On CPUs that is all that is left, as its processes may share them with anything."""
        return max(1.0, min(self.left_s, LAUNCH_S) if self.on_gpus else self.left_s)

    def found(self, name: str, holds: bool | None, told: str) -> TrialFinding:
        """`holds`: None where nothing judges it."""
        state = TrialState.TOLD if holds is None else TrialState.PASSED if holds else TrialState.FAILED
        return TrialFinding(self.part, self.ranks, name, state, told)

    def left_out(self, name: str, why: str) -> TrialFinding:
        return TrialFinding(self.part, self.ranks, name, TrialState.LEFT_OUT, why)


TrialPart = Callable[[TrialSetting], Iterator[TrialFinding]]
