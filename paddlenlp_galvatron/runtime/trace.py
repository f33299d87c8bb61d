"""The time line of traced steps on this rank: passes, waits, collectives, optimizer, data; as Chrome trace events.

Untraced steps record nothing, at almost no cost. On a GPU, spans are on the compute stream, between two marks that are
read after the step: synchronizing would also wait for messages, which may need a message that this rank has yet to
send. Communication shows where computing waits for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import device

US_PER_NS, US_PER_MS = 1e-3, 1e3

Span = tuple[str, str, device.Mark, device.Mark]  # name, category, ends

_spans: list[Span] | None = None  # None: untraced


@contextmanager
def traced(rank: int, events: list[dict[str, Any]]) -> Iterator[None]:
    """Append this rank's events inside the context, by the time since 1970. No message is in flight at either end,
    except after a failure."""
    global _spans
    device.synchronize()
    first = device.Mark(timed=True)
    spans: list[Span] = []
    _spans = spans
    try:
        yield
    finally:
        _spans = None
    device.synchronize()
    began_us = first.since_1970_ns * US_PER_NS
    events += [
        {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": began_us + start.ms_after(first) * US_PER_MS,
            "dur": stop.ms_after(start) * US_PER_MS,
            "pid": rank,
            "tid": 0,
        }
        for name, category, start, stop in spans
    ]


@contextmanager
def span(name: str, category: str) -> Iterator[None]:
    """Names the span of the block on the time line."""
    if _spans is None:
        yield
        return
    spans, start = _spans, device.Mark(timed=True)
    try:
        yield
    finally:
        spans.append((name, category, start, device.Mark(timed=True)))
