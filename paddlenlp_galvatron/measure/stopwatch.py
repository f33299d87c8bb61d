"""Times operations on all ranks of the world: warm-up, repeated samples, the median of several rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from ..runtime import device
from ..runtime.collectives import all_gather
from .launcher import WIDE

Array = NDArray[np.float64]
Operation = Callable[[], Any]
WALL, PROCESSOR = 0, 1  # columns of a sample: elapsed time, and processor time of this process

MIN_SAMPLES, MAX_SAMPLES = 3, 100
ROUNDS, MOST_ROUNDS = 3, 5  # rounds of each number, spread over time; MOST_ROUNDS if they differ
SERIES = 4  # samples of a collective between two barriers, before ranks drift apart
SHORTEST_SAMPLE_MS = 5.0  # on a GPU, shorter operations are started several times in a sample
CPU_SAMPLES = 7  # samples of a collective in a round on CPU: one varies by 40 % (standard deviation)
CPU_PRODUCTS, MATRIX = 2, 256  # matrix products before each sample: about 2 ms, as in a small layer


@dataclass(frozen=True)
class Timing:
    """One measured number."""

    ms: float
    spread: float  # interquartile range / median of the samples

    @classmethod
    def of_samples(cls, samples_ms: Array | Sequence[float], percentile: float = 50) -> Timing:
        """The median of samples, or another percentile."""
        low, middle, high = np.percentile(samples_ms, [25, 50, 75])
        return cls(float(np.percentile(samples_ms, percentile)), float((high - low) / middle) if middle else 0.0)

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[float]], percentile: float = 50) -> Timing:
        """The median of the rounds' means. A round counts by its mean because times add up in training, including the
        few messages in ten that take several times as long."""
        return cls.of_samples([float(np.mean(samples)) for samples in rounds], percentile)


def needs_round(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether a number needs another round: it has fewer than ROUNDS, or they differ and are fewer than MOST_ROUNDS."""
    return len(rounds) < ROUNDS or (len(rounds) < MOST_ROUNDS and Timing.of_rounds(rounds).spread > WIDE)


class Clock:
    """Times a series of samples. On a GPU calls return when their work is queued. An event is queued after each sample
    and the host starts the next, as in training: launch time shows only where the device waits for the host."""

    def start(self) -> None:
        """Begin a series. The device must be idle."""
        self._marks: list[device.Mark] = []
        self._host_ms: list[tuple[float, float]] = []
        self.sample()

    def sample(self) -> None:
        """End a sample, which began with the series or the previous sample."""
        self._host_ms.append((1000 * time.perf_counter(), 1000 * time.process_time()))
        self._marks.append(device.Mark(timed=True))

    def samples_ms(self) -> Array:
        """Times [samples, (WALL, PROCESSOR)] in ms; waits for the device."""
        device.synchronize()
        times = np.diff(np.array(self._host_ms), axis=0)
        if device.on_gpu():
            times[:, WALL] = [end.ms_after(begin) for begin, end in pairwise(self._marks)]
        return times


class Stopwatch:
    """Times operations. All ranks of the world call its methods in the same order and get the same results."""

    def __init__(
        self, world_size: int, per_node: int | None = None, budget_ms: float = 250, time_budget_s: float | None = None
    ):
        """`per_node` ranks compute on each host. `budget_ms` is spent on the samples of one number in a round, within
        MIN_SAMPLES and MAX_SAMPLES; after `time_budget_s` seconds every number gets the fewest."""
        self.world = dist.get_group(0) if world_size > 1 else None
        self._clock = Clock()
        self._budget_ms = budget_ms
        self._deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        # Elapsed ms per ms of processor time while all ranks of this host compute.
        self._wall_per_processor_ms = max(1 / threads, (per_node or world_size) / len(device.host_processors()))
        self._matrix = paddle.ones([MATRIX, MATRIX])

    def is_late(self) -> bool:
        """Whether the time budget is spent on any rank."""
        if self._deadline is None:
            return False
        if self.any_rank(time.monotonic() > self._deadline):
            self._budget_ms = 0
            return True
        return False

    def any_rank(self, holds: bool) -> bool:
        """Whether a condition holds on any rank."""
        return bool(all_gather(paddle.full([1], float(holds)), self.world).numpy().any())

    def time_collective(self, operation: Operation) -> Array:
        """Times of a collective in ms, [samples, ranks or 1].

        On GPUs: short series without their first sample, as ranks leave the barrier unevenly. On CPU: ranks compute
        before each sample, and the last rank to arrive counts, as it waits for no other. (Back to back, small messages
        take a quarter of the time.)
        """
        if not device.on_gpu() and self.world is not None:
            samples = self._samples([self._compute, operation], 1 + CPU_SAMPLES + 1)[1:-1]  # peers end before the last
            last_to_arrive: Array = samples[:, :, 1, WALL].min(axis=1, keepdims=True)
            return last_to_arrive
        repeats = max(1, round(SHORTEST_SAMPLE_MS / self._warm_ms(operation))) if device.on_gpu() else 1

        def repeated() -> None:
            for _ in range(repeats):
                operation()

        series = self._count((1 + SERIES) * self._warm_ms(repeated), least=1)
        times = self._samples([repeated], 1 + SERIES, series)[..., 0, WALL] / repeats
        counted: Array = times.reshape(series, 1 + SERIES, -1)[:, 1:].reshape(series * SERIES, -1)
        return counted

    def _compute(self) -> None:
        for _ in range(CPU_PRODUCTS):
            paddle.matmul(self._matrix, self._matrix)

    def time_independent(self, *steps: Operation) -> Array:
        """Times in ms, [samples, steps], of steps that each rank runs without its peers, all ranks at once. The slowest
        rank counts, because peers wait for it in training.

        On CPU this is processor time, scaled to the processors that each rank has: other load does not change it.
        """
        kind, scale = (WALL, 1.0) if device.on_gpu() else (PROCESSOR, self._wall_per_processor_ms)
        warm = scale * self._samples(steps, 2)[1:, ..., kind]  # the first sample loads kernels
        more = self._count(float(warm.sum(axis=2).mean())) - len(warm)
        times: Array = np.concatenate([warm, scale * self._samples(steps, more)[..., kind]])
        slowest: Array = times.max(axis=1)
        return slowest

    def once(self, operation: Operation) -> float:
        """Time in ms of one run of an operation; the slowest rank counts."""
        return float(self._samples([operation], 1)[..., WALL].max())

    def _warm_ms(self, operation: Operation) -> float:
        """Time in ms of the second run; ranks begin the first at different times."""
        return float(self._samples([operation], 2)[-1, ..., WALL].max())

    def _count(self, sample_ms: float, least: int = MIN_SAMPLES) -> int:
        return min(max(round(self._budget_ms / sample_ms), least), MAX_SAMPLES)

    def _samples(self, steps: Sequence[Operation], count: int, series: int = 1) -> Array:
        """Times in ms, [series · count, ranks, steps, (WALL, PROCESSOR)]; ranks meet before each series."""
        times = []
        for _ in range(series):
            # Not gloo's barrier, whose messages share one tag: of several hundred thousand, one never returned.
            self.any_rank(False)
            device.synchronize()
            self._clock.start()
            for _ in range(count):
                for step in steps:
                    step()
                    self._clock.sample()
            times.append(self._clock.samples_ms())
        local = np.concatenate(times).reshape([1, series * count, len(steps), 2])
        gathered: Array = all_gather(paddle.to_tensor(local), self.world).numpy()
        return gathered.swapaxes(0, 1)
