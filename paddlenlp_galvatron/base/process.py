"""Signals that end a process, streams that close before it ends, and processes with limits of memory and time.

A command finishes its work even when a pager or `head` closes the pipe, or a terminal or disk disappears.

Foreign tokenizers and chat templates run in a forked process with limits: they may use all memory, never end, or ignore
signals.
"""

import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .errors import UserError
from .units import MIB

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT  # exit code, as in shells
CLOSED = {errno.EPIPE, errno.EIO}  # no reader: a pipe, a terminal


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
    """Make stdout and stderr such streams. Yields a function that returns the error with which stdout failed, or None
    (a closed pipe is no error)."""
    streams = sys.stdout, sys.stderr
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
        sys.stdout, sys.stderr = streams


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Signals that this process does not ignore: nohup makes it ignore SIGHUP, and `&` in a script SIGINT."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stop_signals(
    then: Callable[[], object] = lambda: None, numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[list[int]]:
    """Collect signals in a list instead of ending the process; each also calls `then`.

    Schedulers repeat SIGTERM: after the first signal the process ends by itself and ignores further SIGTERM and SIGHUP.
    Only the main thread may handle signals; elsewhere this changes nothing.
    """
    received: list[int] = []  # not an Event: a nested signal would wait for its lock for ever

    def take(number: int, _: object) -> None:
        received.append(number)
        then()

    main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.signal(each, take) for each in heeded(*numbers) if main}
    try:
        yield received
    finally:
        for each, handler in handlers.items():
            signal.signal(each, (lambda *_: None) if received and each != signal.SIGINT else handler)


DONE, REFUSED = b"+", b"-"
TIMERS = (signal.SIGPROF, signal.SIGALRM)
# Signals that get their default handler in the child: those of Python, Paddle and pytest serve the parent.
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, *TIMERS)
# A token needs 100 to 200 bytes of memory and stands for 0.5 to 4 bytes of text; a thread needs at least 2 MiB.
LEAST_MIB, MEMORY_PER_BYTE = 1024, 500
LEAST_S, SLOWEST_BYTES_S = 10.0, 10_000.0  # of processor time; tokenizers usually read a million bytes a second
LONGEST_WAIT = 20  # wall time / processor time, on a machine with that many processes a core


def limited(work: Callable[[], bytes], name: str, size_bytes: int) -> bytes:
    """Returns the result of `work` in a forked process. Raises the UserError of `work`, or one that `name` takes more
    memory or processor time than any valid input of `size_bytes`."""
    memory_mib, seconds = LEAST_MIB + MEMORY_PER_BYTE * size_bytes // MIB, LEAST_S + size_bytes / SLOWEST_BYTES_S
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _work(work, write, memory_mib, seconds)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            result = pipe.read()
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if result[:1] == REFUSED:
        raise UserError(result[1:].decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    if -code in TIMERS:
        raise UserError(f"{name} takes more than {seconds:.0f} s; do you trust its origin?")
    if code or result[:1] != DONE:
        raise UserError(f"{name} takes more than {memory_mib:,} MiB of memory, or crashed; do you trust its origin?")
    return result[1:]


def _work(work: Callable[[], bytes], write: int, memory_mib: int, seconds: float) -> NoReturn:
    try:
        for number in ENDED_BY:
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT * seconds)  # wall time limit: the work may block
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)  # hides what libraries print at exit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + memory_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        try:
            result = DONE + work()
        except UserError as error:
            result = REFUSED + str(error).encode(errors="replace")
        with os.fdopen(write, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    finally:
        os._exit(1)


def _data_bytes() -> int:
    """Current data memory of this process in bytes, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
