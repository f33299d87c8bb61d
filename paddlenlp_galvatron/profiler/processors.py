"""Which processors of this host a rank computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def pinned(index: int, ranks: int) -> Iterator[None]:
    """Run all threads of this process on its share of the processors: that of rank `index` of `ranks` on this host.
    Nothing is done where there are fewer processors than ranks."""
    mine = sorted(os.sched_getaffinity(0))
    each = len(mine) // ranks
    if not each or index >= ranks:
        yield
        return
    _move(mine[index * each : (index + 1) * each])
    try:
        yield
    finally:
        _move(mine)


def _move(processors: Sequence[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), processors)
