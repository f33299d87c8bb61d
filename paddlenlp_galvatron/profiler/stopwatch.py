"""Times what all ranks of the world do together: warm-up, repetitions, median and spread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ..runtime import device
from ..runtime.collectives import all_gather
from ..runtime.processors import of_host as processors_of_host
from .clock import PROCESSOR, WALL, Array, clock

LEAST_LAPS, MOST_LAPS = 3, 100  # or series of laps
SERIES = 4  # laps of a message between two common starts: ranks in a row of many stay in step, or out of it, for long
LEAST_SPREAD = 0.1  # of any time, where two are told apart: fewer laps show less than there is
WIDE = 0.3  # spread of a number that is measured again
SHORTEST_LAP_MS = 5.0  # operations that a GPU does sooner are started several times in a lap
WORK_MS = 2.0  # processor time between two messages on CPU, about that between two of a small layer; see docs: validate
WORK_LAPS = 7  # of such messages in a turn: a single one is off by 40 % (standard deviation)
MATRIX = 256  # side of the matrices that are multiplied as work

Operation = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """One measured number."""

    ms: float  # median of the laps; of turns a mean
    spread: float  # interquartile range of the laps / median

    @classmethod
    def of(cls, laps_ms: Array | Sequence[float]) -> Timing:
        low, middle, high = np.percentile(laps_ms, [25, 50, 75])
        return cls(float(middle), float((high - low) / middle))

    @classmethod
    def of_turns(cls, turns: Sequence[Sequence[float]], percent: float = 50) -> Timing:
        """Of laps that were run in turns, at different times.

        What happens within a turn happens in training, where times add up: its mean counts, with the few laps in ten
        that take several times as long as the others, as messages on CPU processes do. Of the turns one counts from
        which `percent` are quicker: the median, as of steps whose time is told. The spread is that of all laps.
        """
        means = [np.mean(laps) for laps in turns]
        return cls(float(np.percentile(means, percent)), cls.of(np.concatenate(turns)).spread)

    @property
    def low_ms(self) -> float:
        """What it is at least, as far as the spread tells."""
        return self.ms * (1 - max(self.spread, LEAST_SPREAD) / 2)

    @property
    def high_ms(self) -> float:
        """What it is at most."""
        return self.ms * (1 + max(self.spread, LEAST_SPREAD) / 2)


class Stopwatch:
    """Times operations. Every rank of the world asks for the same ones in the same order, and gets the same answers."""

    def __init__(
        self, world_size: int, per_node: int | None = None, budget_ms: float = 250, time_budget_s: float | None = None
    ):
        """`per_node` ranks compute on each host. `budget_ms` is spent on the repetitions of one number, within
        LEAST_LAPS and MOST_LAPS; what is asked for when `time_budget_s` have passed gets the fewest."""
        self.world = dist.get_group(0) if world_size > 1 else None
        self._clock = clock()
        self._budget_ms = budget_ms
        self._deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        ranks, processors = per_node or world_size, len(processors_of_host())
        self.pinned = not device.on_gpu() and ranks <= processors  # whether each rank has processors of its own
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        # How long a rank's ms of processor time takes while all ranks of this host, alike, compute.
        self._wall_per_processor_ms = max(1 / threads, ranks / processors)

    def is_late(self) -> bool:
        """Whether the time budget is spent on any rank: the same answer on all."""
        if self._deadline is None:
            return False
        if self.any_rank(time.monotonic() > self._deadline):
            self._budget_ms = 0
            return True
        return False

    def any_rank(self, holds: bool) -> bool:
        """Whether it holds on any rank: the same answer on all."""
        return bool(all_gather(paddle.full([1], float(holds)), self.world).numpy().any())

    def together(self, operation: Operation) -> Array:
        """Times in ms [laps, ranks or 1] of an operation that the ranks do together, such as a collective: on GPUs
        short series of laps one after the other, so that each but the first, which does not count, begins when the
        ranks are done with the one before.

        On CPU the ranks do some work before each, and it is the time of the rank that waits for no other; where ranks
        share processors, what the operation adds to the work's time, as each waits until others have computed, too. In
        a row, without work between them, small messages took a quarter of that.
        """
        if not device.on_gpu() and self.world is not None:
            return self._after_work(operation)
        inner = max(1, round(SHORTEST_LAP_MS / self._warm_ms(operation))) if device.on_gpu() else 1

        def several() -> None:
            for _ in range(inner):
                operation()

        starts = self._count((1 + SERIES) * self._warm_ms(several), least=1)
        laps = self._laps([several], 1 + SERIES, starts)[..., 0, WALL] / inner
        counting: Array = laps.reshape(starts, 1 + SERIES, -1)[:, 1:].reshape(starts * SERIES, -1)
        return counting

    def _after_work(self, operation: Operation) -> Array:
        laps = self._laps([self._work, operation], 1 + WORK_LAPS + 1)[1:-1]  # beside the last one, others are done
        of_the_last: Array = laps[:, :, 1, WALL].min(axis=1, keepdims=True)
        if self.pinned:
            return of_the_last
        added = laps[..., WALL].sum(axis=2) - self._wall_per_processor_ms * laps[:, :, 0, PROCESSOR]
        return np.maximum(added.mean(axis=1, keepdims=True), of_the_last)

    @cached_property
    def _work(self) -> Operation:
        """Takes WORK_MS of processor time."""
        matrix = paddle.ones([MATRIX, MATRIX])
        each_ms = self._laps([lambda: paddle.matmul(matrix, matrix)], LEAST_LAPS)[1:, ..., PROCESSOR].mean()
        products = max(1, round(WORK_MS / each_ms))

        def work() -> None:
            for _ in range(products):
                paddle.matmul(matrix, matrix)

        return work

    def apart(self, *steps: Operation) -> Array:
        """Times in ms [laps, steps] of steps that each rank takes for itself, one after the other, all ranks at once.

        On CPU processes this is the processor time that they take, scaled to the processors that each has while all
        compute: the same whatever else the machine does meanwhile. The slowest rank counts: it sets the pace in
        training, as the others wait for it where they meet.
        """
        kind, scale = (WALL, 1.0) if device.on_gpu() else (PROCESSOR, self._wall_per_processor_ms)
        warm = scale * self._laps(steps, 2)[1:, ..., kind]  # the first lap finds kernels and memory, and does not count
        more = self._count(float(warm.sum(axis=2).mean())) - len(warm)
        laps: Array = np.concatenate([warm, scale * self._laps(steps, more)[..., kind]])
        of_the_slowest: Array = laps.max(axis=1)
        return of_the_slowest

    def once(self, operation: Operation) -> float:
        """Time in ms of one run of an operation that the ranks do together, the slowest rank's."""
        return float(self._laps([operation], 1)[..., WALL].max())

    def _warm_ms(self, operation: Operation) -> float:
        """Time in ms of its second run: the first one's has the ranks' uneven start."""
        return float(self._laps([operation], 2)[-1, ..., WALL].max())

    def _count(self, lap_ms: float, least: int = LEAST_LAPS) -> int:
        return min(max(round(self._budget_ms / lap_ms), least), MOST_LAPS)

    def _laps(self, steps: Sequence[Operation], count: int, starts: int = 1) -> Array:
        """Times in ms [starts · laps, ranks, steps, clocks]; the ranks start every `count` laps together."""
        series = []
        for _ in range(starts):
            # Gloo's barrier gives all of its messages one tag: of several hundred thousand, one never ended.
            self.any_rank(False)
            device.synchronize()
            self._clock.start()
            for _ in range(count):
                for step in steps:
                    step()
                    self._clock.lap()
            series.append(self._clock.laps_ms())
        mine = np.concatenate(series).reshape([1, starts * count, len(steps), 2])
        times: Array = all_gather(paddle.to_tensor(mine), self.world).numpy()
        return times.swapaxes(0, 1)
