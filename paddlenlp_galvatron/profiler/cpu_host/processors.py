"""Which processors of this host a rank computes on, and that they stay awake, or wake each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Runs whenever nothing else wants the processor, and ends with the process that started it.
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    pass
"""

# A token goes round among processes on the given processors, each of which halts until it comes.
PASS_TOKEN = """
import os, sys, time
end, processors = time.monotonic() + float(sys.argv[1]), [int(word) for word in sys.argv[2:]]
pipes = [os.pipe() for _ in processors]
number = next((number for number in range(1, len(processors)) if not os.fork()), 0)
os.sched_setaffinity(0, {processors[number]})
take, give = pipes[number][0], pipes[(number + 1) % len(processors)][1]
if number == 0:
    os.write(give, b"x")
while os.read(take, 1) == b"x" and time.monotonic() < end:
    os.write(give, b"x")
os.write(give, b".")
"""


@contextmanager
def pinned(index: int, ranks: int, wanted: bool = True) -> Iterator[None]:
    """Run all threads of this process on its share of the processors: that of rank `index` of `ranks` on this host.
    Nothing is done where it is not wanted, or there are fewer processors than ranks."""
    mine = sorted(os.sched_getaffinity(0))
    parts = shares(ranks)
    if not wanted or index >= len(parts):
        yield
        return
    _move(parts[index])
    try:
        yield
    finally:
        _move(mine)


def shares(ranks: int) -> list[list[int]]:
    """The processors of each of `ranks` on this host; none where there are fewer processors than ranks."""
    mine = sorted(os.sched_getaffinity(0))
    each = len(mine) // ranks
    return [mine[each * index : each * (index + 1)] for index in range(ranks if each else 0)]


def wake_in_turn(processors: Sequence[int], seconds: float) -> None:
    """Let processors of this host wake each other, thousands of times a second; they should be idle."""
    words = [str(seconds), *map(str, processors)]
    subprocess.run([sys.executable, "-S", "-c", PASS_TOKEN, *words], check=False)


class Spinners:
    """Keep the processors of this process from halting while it waits, from `awake` on: a virtual one can take
    milliseconds to wake, far longer than a small message, or none, as it happens."""

    def __init__(self, processors: Iterable[int] = ()):
        self._processes = [
            subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(processor), str(os.getpid())])
            for processor in processors
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the processors halt meanwhile."""
        self._tell(signal.SIGSTOP)
        try:
            yield
        finally:
            self._tell(signal.SIGCONT)

    def _tell(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        self._tell(signal.SIGKILL)


@contextmanager
def awake(wanted: bool = True) -> Iterator[Spinners]:
    """Spinners on all processors of this process, while the context is open; none where they are not wanted."""
    spinners = Spinners(os.sched_getaffinity(0) if wanted else ())
    try:
        yield spinners
    finally:
        spinners.end()


def _move(processors: Sequence[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), processors)
