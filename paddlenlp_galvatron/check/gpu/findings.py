"""What a part of the check is given, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ...launch.processes import Device
from ...profiles.reserve import Reserve

# Of small models on GPUs: what takes longer hangs. Eight ranks that import Paddle from a network disk take a minute.
LAUNCH_S = 300.0
CUT_SHORT_S = 60.0  # a launch that was given less, and was not done, shows nothing


class TrialState(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TOLD = "told"  # a figure that nothing judges
    LEFT_OUT = "left out"  # it cannot be tried here
    NO_TIME = "no time"


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

    def kept(self, used_mib: float, reserve: Reserve, of: str = "") -> TrialFinding:
        """Whether what a GPU holds beside Paddle's allocator is within what is kept for it."""
        told = f"{used_mib:.0f} MiB used beside what Paddle reserved, {reserve.fixed_mib:.0f} MiB kept for it"
        return self.found(f"{of}memory that is not Paddle's", used_mib <= reserve.fixed_mib, told)

    def left_out(self, name: str, why: str) -> TrialFinding:
        return TrialFinding(self.part, self.ranks, name, TrialState.LEFT_OUT, why)

    def no_time(self, name: str, why: str = "no time was left") -> TrialFinding:
        return TrialFinding(self.part, self.ranks, name, TrialState.NO_TIME, why)

    def ended(self, name: str, fault: str, given_s: float) -> TrialFinding:
        """Of what a launch that was given so long did not finish: it failed, unless it was only cut short."""
        cut_short = given_s < CUT_SHORT_S and self.left_s <= 0
        return self.no_time(name, f"cut off after {given_s:.0f} s") if cut_short else self.found(name, False, fault)


TrialPart = Callable[[TrialSetting], Iterator[TrialFinding]]
