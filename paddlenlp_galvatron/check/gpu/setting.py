"""The setting of a part of the check; it launches ranks and makes findings."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...base.text import gib
from ...launch.processes import Device, LaunchError, launch
from ...profiles.reserve import Reserve
from ..findings import Finding, State

# A launch of a small model on GPUs that takes longer is hung. Eight ranks import Paddle from a network disk in a
# minute.
LAUNCH_S = 300.0
CUT_SHORT_S = 60.0  # a launch with a lower limit that does not finish proves nothing
PARTS = ("kernels", "parity", "schedules", "resume", "memory", "later", "waits", "overlap", "prediction", "stock")


@dataclass(frozen=True)
class CheckSetting:
    """Launches the ranks of a part and makes its findings."""

    part: str
    ranks: int
    device: Device
    folder: Path  # logs stay here
    end: float  # deadline, monotonic clock

    @property
    def on_gpus(self) -> bool:
        return self.device == "gpu"

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    @property
    def launch_s(self) -> float:
        """Time limit of a launch. On CPUs it is all the time left, as other programs may share them."""
        return max(1.0, min(self.left_s, LAUNCH_S) if self.on_gpus else self.left_s)

    def launch(
        self,
        module: str,
        *words: object,
        ranks: int | None = None,
        logs: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run a module with the arguments `words` on all ranks or fewer. Raises LaunchError."""
        arguments, logs = [str(word) for word in words], logs or self.folder
        launch(module, arguments, ranks or self.ranks, logs, self.launch_s, device=self.device, variables=variables)

    def results(self) -> list[Any]:
        """The JSON that each rank left in the folder as `<rank>.json`."""
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(self.ranks)]

    def found(self, name: str, holds: bool | None, figures: str) -> Finding:
        """`holds`: None means not judged."""
        state = State.INFO if holds is None else State.OK if holds else State.FAILED
        return self._finding(name, figures, state)

    def kept(self, used_mib: float, reserve: Reserve, subject: str = "") -> Finding:
        """Whether the memory of a GPU outside Paddle's allocator is within the reserve."""
        figures = f"{gib(used_mib)} GiB used, not reserved by Paddle, {gib(reserve.fixed_mib)} GiB kept for it"
        return self.found(f"{subject}memory outside Paddle's allocator", used_mib <= reserve.fixed_mib, figures)

    def skipped(self, name: str, why: str) -> Finding:
        return self._finding(name, why, State.SKIPPED)

    def no_time(self, name: str, why: str = "no time was left") -> Finding:
        return self._finding(name, why, State.NO_TIME)

    def ended(self, name: str, fault: str, given_s: float) -> Finding:
        """A case that a launch of `given_s` did not finish: failed, or skipped if the launch was cut short."""
        cut_short = given_s < CUT_SHORT_S and self.left_s <= 0
        return self.no_time(name, f"cut off after {given_s:.0f} s") if cut_short else self.found(name, False, fault)

    def _finding(self, name: str, figures: str, state: State) -> Finding:
        return Finding(name, figures, state, part=self.part, ranks=self.ranks)


Part = Callable[[CheckSetting], Iterator[Finding]]


def in_turn(
    setting: CheckSetting,
    names: Sequence[str],
    start: Callable[[int, int], None],
    judge: Callable[[int], Finding | None],
) -> Iterator[Finding]:
    """Run all cases in one launch; if it ends within a case, launch the later cases again.

    `start(first, number)` is launch `number`, of the cases from `first` on; `judge(index)` gives None for a case
    without a result.
    """
    first, launches = 0, 0
    while first < len(names):
        given_s = setting.launch_s
        if setting.left_s <= 0:
            yield from map(setting.no_time, names[first:])
            return
        fault = "its ranks left no result"
        try:
            start(first, launches)
        except LaunchError as error:
            fault = str(error)
        while first < len(names) and (finding := judge(first)):
            yield finding
            first += 1
        launches += 1
        if first < len(names):
            yield setting.ended(names[first], fault, given_s)
            first += 1
