"""Signals that end a process, and standard output and error that end before it does.

A pager is closed, `head` has seen enough, a terminal or a disk is gone: the command does its work all the same.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT  # the exit code, as shells have it
CLOSED = {errno.EPIPE, errno.EIO}  # nobody reads: a pipe, a terminal


class Stream:
    """Writes to a stream until it fails, then discards."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, work: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            work()
        except OSError as error:
            self.error = error
            with suppress(OSError):  # Python flushes its buffer there when the process ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def lasting_streams() -> Iterator[Callable[[], OSError | None]]:
    """Meanwhile stdout and stderr are such streams. Yields a function that returns the error with
    which stdout failed, or None (a closed pipe is no error)."""
    before = sys.stdout, sys.stderr
    out, err = Stream(sys.stdout), Stream(sys.stderr)

    def lost() -> OSError | None:
        out.flush()
        return None if out.error is None or out.error.errno in CLOSED else out.error

    sys.stdout, sys.stderr = out, err
    try:
        yield lost
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Signals that this process does not ignore: nohup lets it ignore SIGHUP, and a script's & SIGINT."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stop_signals(
    then: Callable[[], object] = lambda: None, numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[list[int]]:
    """The signals that came meanwhile, however often, instead of ending the process; each calls `then`, too.

    Schedulers repeat SIGTERM: once signalled, the process ends by itself, and neither SIGTERM nor SIGHUP does anything.
    Outside of the main thread, which alone may take signals, they act as before.
    """
    received: list[int] = []  # no event: its lock, held by a signal that another one interrupts, would never come free

    def take(number: int, _: object) -> None:
        received.append(number)
        then()

    main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, take) for each in heeded(*numbers) if main}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, (lambda *_: None) if received and each != signal.SIGINT else handler)
