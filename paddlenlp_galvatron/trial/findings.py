"""What a part of the check is given, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..launch.processes import Device

LAUNCH_S = 120.0  # of small models on GPUs: what takes longer hangs


class State(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TOLD = "told"  # a figure that nothing judges
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    part: str
    ranks: int
    name: str
    state: State
    told: str  # the figure, the fault, or why it was left out
    seconds: float = 0.0


@dataclass(frozen=True)
class Setting:
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

    def found(self, name: str, holds: bool | None, told: str) -> Finding:
        """`holds`: None where nothing judges it."""
        state = State.TOLD if holds is None else State.PASSED if holds else State.FAILED
        return Finding(self.part, self.ranks, name, state, told)

    def left_out(self, name: str, why: str) -> Finding:
        return Finding(self.part, self.ranks, name, State.LEFT_OUT, why)


Part = Callable[[Setting], Iterator[Finding]]
