"""Operations that this rank has started on its groups and not seen end; a watchdog names one that never ends.

On a GPU a call returns at once, and a hang shows at the next read of a value, which does not name its cause.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import Any

from ..launch import status
from ..launch.faults import named
from ..launch.status import RankOutcome
from . import device

CHECK_S = 5.0  # from one look of the watchdog to the next
MESSAGES = ("send", "receive")  # between stages; all others are collectives


class Operation:
    """A collective or message that was started."""

    __slots__ = ("_ended", "_step", "shown", "since", "task", "what")

    def __init__(self, kind: str, ranks: tuple[int, ...]):
        self.what = f"{kind} of {named(ranks)}"
        self._step = status.step()
        self.shown = ("wait", "wait") if kind in MESSAGES else (kind, "collective")  # on a time line
        self.since = time.monotonic()
        self.task: Any = None  # Paddle's, once the call has returned
        self._ended = False
        while _started and _started[0].ended:
            _started.popleft()
        _started.append(self)

    @property
    def ended(self) -> bool:
        """Whether its results are there."""
        task = self.task
        if task is not None and task.is_completed():
            self._ended, self.task = True, None  # gloo's tasks hold what they read
        return self._ended

    @property
    def started(self) -> str:
        """The operation and its step, in words."""
        return self.what + status.in_step(self._step)

    def wait(self) -> None:
        """Let what this rank computes next wait for it: the host on CPU, the device's queue on a GPU."""
        if (task := self.task) is not None:  # else the watchdog has seen its end
            task.wait()
        _ = self.ended


_started: deque[Operation] = deque()


def oldest() -> tuple[str, float] | None:
    """The operation or wait that has lasted longest, and its start by the monotonic clock."""
    waits = [(one.started, one.since) for one in list(_started) if not one.ended][:1]
    if wait := status.longest_wait():
        waits.append(wait)
    return min(waits, key=lambda wait: wait[1], default=None)


def watch(limit_s: float) -> None:
    """From now on end this process once something has been under way for too long, and say what."""
    threading.Thread(target=_watch, args=(limit_s, device.gpu_number()), daemon=True).start()


def _watch(limit_s: float, gpu: int | None) -> None:
    device.use_in_thread(gpu)
    while True:
        time.sleep(min(CHECK_S, limit_s))
        if (wait := oldest()) and time.monotonic() - wait[1] > limit_s:
            late = f"has not ended within {limit_s:.0f} s"
            status.failed(RankOutcome.LOST_A_PEER, f"it {late}", waited_in=wait[0])
            sys.stderr.write(f"error: {wait[0]} {late}\n")
            sys.stderr.flush()
            os._exit(1)
