"""The share of a machine's processor time that other programs took while something ran."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from os import cpu_count, sysconf
from pathlib import Path
from time import monotonic

STAT = Path("/proc/stat")
IDLE_FIELDS = (1, 3, 4)  # of the line's numbers: nice (it gives way), idle, iowait (proc_stat(5))
COUNTED_FIELDS = 8  # up to steal; guests' time is within user's
NOTEWORTHY = 0.05  # of the processors' time


class Disturbance:
    """Filled in when the time is over."""

    share: float | None = None  # of all processors' time, that others took; None: this host does not tell

    @property
    def words(self) -> str:
        """For people; nothing where it is not worth a word."""
        if self.share is None or self.share < NOTEWORTHY:
            return ""
        return f"disturbed: other programs, or the host, took {self.share:.0%} of the processors' time meanwhile"


@contextmanager
def watched() -> Iterator[Disturbance]:
    """Watch what is not of this process or of children that end meanwhile."""
    found, start, busy, ours = Disturbance(), monotonic(), _busy_s(), _own_s()
    yield found
    capacity_s = (monotonic() - start) * (cpu_count() or 1)
    if busy is not None and (now := _busy_s()) is not None and capacity_s > 0:
        found.share = min(max((now - busy - (_own_s() - ours)) / capacity_s, 0.0), 1.0)


def _busy_s() -> float | None:
    """Seconds in which processors of this host were not idle, stolen ones too, since it started."""
    try:
        numbers = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]][:COUNTED_FIELDS]
    except (OSError, ValueError):
        return None
    return sum(n for field, n in enumerate(numbers) if field not in IDLE_FIELDS) / sysconf("SC_CLK_TCK")


def _own_s() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)
