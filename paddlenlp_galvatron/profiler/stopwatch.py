"""Times what all ranks of the world do together: warm-up, repetitions, median and spread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from ..runtime.collectives import all_gather

LEAST_LAPS, MOST_LAPS = 3, 30
ATTEMPTS = 2
STEADY = 0.1  # spread of laps that are not run again
SHORTEST_LAP_MS = 2.0  # shorter operations run several times in a lap, so that the ranks' uneven start weighs little

Operation = Callable[[], Any]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """One measured number."""

    ms: float  # median of the laps
    spread: float  # interquartile range of the laps / median

    @classmethod
    def of(cls, laps_ms: Array | Sequence[float]) -> Timing:
        low, middle, high = np.percentile(laps_ms, [25, 50, 75])
        return cls(float(middle), float((high - low) / middle))

    @classmethod
    def of_turns(cls, turns: Sequence[Sequence[float]]) -> Timing:
        """Of laps that were run in turns, at different times: what disturbs them only adds time, so the median of the
        quickest turn counts, and the spread is that of all."""
        return cls(float(min(np.median(laps) for laps in turns)), cls.of(np.concatenate(turns)).spread)

    @property
    def low_ms(self) -> float:
        """What it is at least, as far as the spread tells."""
        return self.ms * (1 - max(self.spread, STEADY) / 2)

    @property
    def high_ms(self) -> float:
        """What it is at most."""
        return self.ms * (1 + max(self.spread, STEADY) / 2)


class Stopwatch:
    """Times operations. Every rank of the world asks for the same ones in the same order, and gets the same answers."""

    def __init__(
        self, world_size: int, per_node: int | None = None, budget_ms: float = 250, time_budget_s: float | None = None
    ):
        """`per_node` ranks compute on each host. `budget_ms` is spent on the repetitions of one number, within
        LEAST_LAPS and MOST_LAPS; what is asked for when `time_budget_s` have passed gets the fewest."""
        self._world = dist.get_group(0) if world_size > 1 else None
        self._budget_ms = budget_ms
        self._deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        self._wall_per_processor_time = _wall_per_processor_time(per_node or world_size)

    def is_late(self) -> bool:
        """Whether the time budget is spent on any rank: the same answer on all."""
        if self._deadline is None:
            return False
        late = np.array([[time.monotonic() > self._deadline]], np.float64)
        if all_gather(paddle.to_tensor(late), self._world).numpy().any():
            self._budget_ms = 0
            return True
        return False

    def together(self, operation: Operation) -> Array:
        """Times in ms [laps, ranks] of an operation that the ranks do together, such as a collective. It is done when
        the slowest rank is."""
        warm_ms = self.once(operation)
        inner = max(1, round(SHORTEST_LAP_MS / warm_ms))

        def several() -> None:
            for _ in range(inner):
                operation()

        laps = [self._laps([several], 1)[0, :, 0] / inner for _ in range(self._count(warm_ms * inner))]
        return np.stack(laps)

    def apart(self, *steps: Operation) -> Array:
        """Times in ms [laps, steps] of steps that each rank takes for itself, one after the other, all ranks at once:
        the mean over the ranks.

        On CPU processes this is the processor time that they take, scaled to the processors that each has while all
        compute: the same whatever else the machine does meanwhile. Laps that differ too much are run again; what
        disturbs them only adds time, so the quicker ones count.
        """
        count = self._count(float(self._laps(steps, 1).sum(axis=2).mean()))
        clock, scale = (time.perf_counter, 1.0) if _on_gpu() else (time.process_time, self._wall_per_processor_time)
        best: Array | None = None
        for _ in range(ATTEMPTS):
            laps: Array = scale * self._laps(steps, count, clock).mean(axis=1)
            whole = Timing.of(laps.sum(axis=1))
            if best is None or whole.ms < Timing.of(best.sum(axis=1)).ms:
                best = laps
            if whole.spread <= STEADY:
                break
        assert best is not None
        return best

    def once(self, operation: Operation) -> float:
        """Time in ms of one run of an operation that the ranks do together, the slowest rank's."""
        return float(self._laps([operation], 1).max())

    def _count(self, lap_ms: float) -> int:
        return min(max(round(self._budget_ms / lap_ms), LEAST_LAPS), MOST_LAPS)

    def _laps(self, steps: Sequence[Operation], count: int, clock: Callable[[], float] = time.perf_counter) -> Array:
        """Times in ms [laps, ranks, steps]; the ranks start the first lap together."""
        mine = np.empty((1, count, len(steps)))
        if self._world is not None:
            dist.barrier()
        synchronize()
        start = clock()
        for lap in range(count):
            for number, step in enumerate(steps):
                step()
                synchronize()
                now = clock()
                mine[0, lap, number] = 1000 * (now - start)
                start = now
        times: Array = all_gather(paddle.to_tensor(mine), self._world).numpy()
        return times.transpose(1, 0, 2)


def _wall_per_processor_time(ranks: int) -> float:
    """How long a rank's second of processor time takes when `ranks` of them, alike, share this host's processors."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    return max(1 / threads, ranks / len(os.sched_getaffinity(0)))


def _on_gpu() -> bool:
    return str(paddle.device.get_device()).startswith("gpu")


def synchronize() -> None:
    """Wait for what was started on this rank's device. On CPU everything has been done when a call returns."""
    if _on_gpu():
        paddle.device.synchronize()
