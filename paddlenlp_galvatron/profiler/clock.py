"""What laps are timed by: the host's clocks on CPU, events in the device's queue on a GPU."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..runtime import device

Array = NDArray[np.float64]
WALL, PROCESSOR = 0, 1  # times of a lap: how long it took, and how long this process computed or launched meanwhile


class Clock(Protocol):
    """Times a series of laps."""

    def start(self) -> None:
        """Begin a series. Nothing may be under way."""

    def lap(self) -> None:
        """What was called since the last mark is a lap."""

    def laps_ms(self) -> Array:
        """Times of the series [laps, clocks] in ms, when all of it is done."""


class HostClock:
    """On CPU, where everything has been done when a call returns."""

    def start(self) -> None:
        self._marks = [_now()]

    def lap(self) -> None:
        self._marks.append(_now())

    def laps_ms(self) -> Array:
        return np.diff(np.array(self._marks), axis=0)


class EventClock:
    """On a GPU, where a call returns when its work is queued. An event stands in the queue behind each lap, and the
    host goes on to the next, as in training: the time to launch shows only where the device waits for it."""

    def start(self) -> None:
        self._host = HostClock()
        self._host.start()
        self._events = [device.Mark(timed=True)]

    def lap(self) -> None:
        self._host.lap()
        self._events.append(device.Mark(timed=True))

    def laps_ms(self) -> Array:
        device.synchronize()
        times = self._host.laps_ms()
        ends = zip(self._events, self._events[1:], strict=False)
        times[:, WALL] = [end.ms_after(begin) for begin, end in ends]
        return times


def clock() -> Clock:
    """That of this rank's device."""
    return EventClock() if device.on_gpu() else HostClock()


def _now() -> tuple[float, float]:
    return 1000 * time.perf_counter(), 1000 * time.process_time()
