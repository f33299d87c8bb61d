"""Signals that end a command, except those that its parent made it ignore."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those that this process does not ignore: nohup lets it ignore SIGHUP, and a script's & SIGINT."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def told_to_stop() -> Iterator[list[int]]:
    """The signals, SIGTERM, Ctrl-C and SIGHUP, that came meanwhile, however often, instead of ending the process.

    Schedulers repeat SIGTERM: once told, the process ends by itself, and neither SIGTERM nor SIGHUP does anything.
    """
    told: list[int] = []  # no event: its lock, held by a signal that another one interrupts, would never come free
    numbers = heeded(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: told.append(number)) for each in numbers}
    try:
        yield told
    finally:
        for each, handler in before.items():
            signal.signal(each, (lambda *_: None) if told and each != signal.SIGINT else handler)
