"""Runs work on files of others in a forked process, with limits of memory and time: a tokenizer or a chat template may
need all memory, never end, or ignore signals."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .errors import UserError
from .units import MIB

DONE, REFUSED = b"+", b"-"
TIMERS = (signal.SIGPROF, signal.SIGALRM)
# Handlers of Python, Paddle and pytest are the parent's affair.
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, *TIMERS)
# A token takes 100 to 200 bytes while it is made, and half a byte to 4 bytes of text; a thread takes 2 MiB and more.
LEAST_MIB, MEMORY_PER_BYTE = 1024, 500
LEAST_S, SLOWEST_BYTES_S = 10.0, 10_000.0  # of processor time; usual are a million bytes a second
LONGEST_WAIT = 20  # times the processor time: a busy machine has so many processes for a core


def limited(work: Callable[[], bytes], name: str, size_bytes: int) -> bytes:
    """Returns the result of `work` in a forked process. Raises UserError: work's own, or that `name`, as the message
    calls it, takes more memory or processor time than any valid input of `size_bytes`."""
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
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT * seconds)  # it may wait for ever
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)  # messages of libraries at exit
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
    """Data memory of this process now, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
