"""The processors of a host whose ranks compute on CPU: each rank has its own, if there are enough, and they stay awake.

A processor that waits halts. A virtual one can then take milliseconds to wake, far longer than most messages, so that
a step of many small ones took up to twice as long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .device import on_gpu

# Runs whenever nothing else wants the processor, and ends with the process that started it.
SPIN = """
import os, sys
os.nice(19)
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    pass
"""
LEAST = 19  # the least priority that is not for idle processors alone, as nice says it
LATE_NS = 10**8  # by which a wait that ends by itself may be late: gloo's take 10 ms, to see whether they are to end
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@cache
def of_host() -> tuple[int, ...]:
    """The processors that the ranks of this host share, as this process found them when it first asked."""
    return tuple(sorted(os.sched_getaffinity(0)))


def shares(ranks: int) -> list[list[int]]:
    """The processors of each of `ranks` on this host; none where there are fewer processors than ranks.

    Of the threads of a core one alone, if there are enough cores: they slow each other down."""
    processors = _one_a_core()
    if len(processors) < ranks:
        processors = list(of_host())
    each = len(processors) // ranks
    return [processors[each * index : each * (index + 1)] for index in range(ranks if each else 0)]


def settle() -> None:
    """Give this rank, if it computes on CPU, its share of the processors for as long as it lives, and keep them awake.

    One that is alone on its host waits for nobody, and is left where it is.
    """
    if mine := _own():
        _move(mine)
        keep_awake(mine)


@contextmanager
def threads_behind() -> Iterator[None]:
    """Threads that are started meanwhile give way to this one where a rank has processors of its own, and sleep longer.

    Gloo's threads read messages. While this one holds a connection they try again and again; on the same processor that
    went on until the scheduler stopped them: 2 to 6 ms for every second or third message behind long work. Each also
    wakes 100 times a second for nothing: 60 of them take 5 % of a core.

    Where ranks share processors, readers that wait for their turn (SCHED_BATCH) made launches of 8 ranks on 2 a third
    quicker, but steps of 4 ranks on 2 three to ten per cent slower: they stay as they are.
    """
    before, own = _threads(), _own()
    yield
    for thread in _threads() - before:
        with suppress(OSError):  # it has ended, or the system lets root alone tell threads so
            Path(f"/proc/{thread}/timerslack_ns").write_text(str(LATE_NS))
        with suppress(ProcessLookupError):
            if own:
                os.setpriority(os.PRIO_PROCESS, thread, LEAST)


@contextmanager
def pinned(index: int, ranks: int, wanted: bool = True) -> Iterator[None]:
    """Run all threads of this process meanwhile on the share of rank `index` of `ranks` on this host, where that is
    wanted and there are enough processors."""
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


def keep_awake(processors: Iterable[int]) -> None:
    """Keep these from halting, until this process ends."""
    for processor in processors:
        words = [sys.executable, "-S", "-c", SPIN, str(processor), str(os.getpid())]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _own() -> list[int]:
    """This rank's share, if it computes on CPU and others on this host do; none where there is not one for each."""
    index, ranks = _place_on_host()
    parts = shares(ranks) if ranks > 1 else []
    return parts[index] if index < len(parts) else []


def _place_on_host() -> tuple[int, int]:
    """(number among the ranks of this host, how many they are), as the launcher has it; on GPUs it is alone."""
    if on_gpu():
        return 0, 1
    return int(os.environ.get("PADDLE_RANK_IN_NODE", "0")), int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))


def _one_a_core() -> list[int]:
    first: dict[str, int] = {}  # of each core, by its threads
    for processor in of_host():
        path = Path(TOPOLOGY.format(processor))
        first.setdefault(path.read_text() if path.exists() else str(processor), processor)
    return list(first.values())


def _move(processors: Sequence[int]) -> None:
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, processors)


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}
