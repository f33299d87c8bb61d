"""The processors of a host whose ranks compute on CPU: each rank has its own, if there are enough."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .device import on_gpu

PLACE = {"PADDLE_RANK_IN_NODE": "0", "PADDLE_LOCAL_SIZE": "1"}  # variables; their values for a process alone
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@cache
def of_host() -> tuple[int, ...]:
    """The processors that the ranks of this host share, as this process found them when it first asked."""
    return tuple(sorted(os.sched_getaffinity(0)))


def shares(ranks: int) -> list[list[int]]:
    """The processors of each of `ranks` on this host; none where there are fewer processors than ranks.

    One thread of each core, if there are enough cores: threads of a core slow each other down."""
    processors = _one_a_core()
    if len(processors) < ranks:
        processors = list(of_host())
    each = len(processors) // ranks
    return [processors[each * index : each * (index + 1)] for index in range(ranks if each else 0)]


def pin_rank() -> None:
    """Give this rank, if it computes on CPU, its share of the processors for as long as it lives.

    One that is alone on its host waits for nobody, and is left where it is.
    """
    index, ranks = (int(os.environ.get(name, alone)) for name, alone in PLACE.items())  # as the launcher has it
    if not on_gpu() and ranks > 1 and index < len(parts := shares(ranks)):
        _move(parts[index])


@contextmanager
def pinned(index: int, ranks: int, wanted: bool = True) -> Iterator[None]:
    """Run all threads of this process meanwhile on the share of rank `index` of `ranks` on this host, where that is
    wanted and there are enough processors."""
    cores = sorted(os.sched_getaffinity(0))
    parts = shares(ranks)
    if not wanted or index >= len(parts):
        yield
        return
    _move(parts[index])
    try:
        yield
    finally:
        _move(cores)


def _one_a_core() -> list[int]:
    first: dict[str, int] = {}  # of each core, by its threads
    for processor in of_host():
        path = Path(TOPOLOGY.format(processor))
        first.setdefault(path.read_text() if path.exists() else str(processor), processor)
    return list(first.values())


def _move(processors: Sequence[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), processors)
