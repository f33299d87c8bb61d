"""The time line of traced steps on this rank: passes, waits, collectives, optimizer, data; as Chrome trace events.

Nothing is noted, and next to nothing costs time, unless a step is traced. On a GPU every span waits for the device at
both ends, so that it holds what it names: traced steps are slower there, and hide no communication behind compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from .device import on_gpu

US_PER_NS = 1e-3

_spans: list[tuple[str, str, int, int]] | None = None  # name, category, start and stop in ns; None: untraced


@contextmanager
def traced(rank: int, events: list[dict[str, Any]]) -> Iterator[None]:
    """Append the events of what this rank does meanwhile, by the time since 1970."""
    global _spans
    _spans = []
    try:
        yield
    finally:
        spans, _spans = _spans, None
        events += [
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": start * US_PER_NS,
                "dur": (stop - start) * US_PER_NS,
                "pid": rank,
                "tid": 0,
            }
            for name, category, start, stop in spans
        ]


@contextmanager
def span(name: str, category: str) -> Iterator[None]:
    """What happens inside has this name on the time line."""
    if _spans is None:
        yield
        return
    spans, start = _spans, _now()
    try:
        yield
    finally:
        spans.append((name, category, start, _now()))


def _now() -> int:
    if on_gpu():
        paddle.device.synchronize()
    return time.time_ns()
