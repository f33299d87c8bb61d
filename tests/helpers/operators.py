"""Operators of Paddle's may need instructions that a processor lacks: a child tries them before a test calls them."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


def require(name: str, operator: Callable[[], object]) -> None:
    """Skip the test where the operator ends its process. The test handles its exceptions."""
    child = os.fork()
    if child == 0:
        for number in CRASHES:
            signal.signal(number, signal.SIG_DFL)  # Paddle's and pytest's handlers write reports
        with suppress(Exception):
            operator()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        pytest.skip(f"{name} ends its process with {signal.Signals(-code).name} on this processor")
