"""For how long a rank waits for others in a gloo group: by gloo 30 s, and Paddle offers no way to change that.

gloo's C++ function `Context::setTimeout` is in Paddle's library. The context is found where the group keeps it: a
function of Paddle gives the communicator behind a group, and a context begins with the address of its class's virtual
table. Memory is read through /proc/self/mem, where an address that is none is an error and no crash. Written against
Paddle 3.3.1; where another Paddle lacks one of these names, gloo's 30 s stay.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paddle import base

COMMUNICATOR = "_ZN6paddle11distributed16ProcessGroupGloo14GetCommContextEv"  # ProcessGroupGloo::GetCommContext()
SET_TIMEOUT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"  # of milliseconds
CLASS = "_ZTVN4gloo10rendezvous7ContextE"  # its virtual table; objects point behind its first two words
HELD = 16  # byte of a Python object of pybind11 at which the address of what it holds stands
WORDS = 16  # of a communicator, among which that of its context is
GLOO_IN = ("libs/libphi_core.so", "libs/libphi.so")  # by Paddle's version, of its folder


def set_gloo_limit(group: Any, limit_s: float) -> None:
    """Set the timeout of a gloo group."""
    with suppress(AttributeError), _memory() as word:
        communicator = ctypes.CDLL(base.libpaddle.__file__)[COMMUNICATOR]
        communicator.restype, communicator.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        gloo = _gloo()
        behind_class = ctypes.addressof(ctypes.c_char.in_dll(gloo, CLASS)) + 16
        start = communicator(word(id(group) + HELD))
        for address in {word(start + 8 * place) for place in range(WORDS)}:
            if word(address) == behind_class:
                gloo[SET_TIMEOUT](ctypes.c_void_p(address), ctypes.c_int64(round(1000 * limit_s)))


def _gloo() -> ctypes.CDLL:
    """Raises AttributeError."""
    folder = Path(base.libpaddle.__file__).parents[1]
    for library in (ctypes.CDLL(str(folder / name)) for name in GLOO_IN if (folder / name).exists()):
        if hasattr(library, SET_TIMEOUT):
            return library
    raise AttributeError(SET_TIMEOUT)


@contextmanager
def _memory() -> Iterator[Callable[[int], int]]:
    """Returns a reader of the 8 bytes at an address; it gives 0 where there is no memory."""
    handle = os.open("/proc/self/mem", os.O_RDONLY)

    def word(address: int) -> int:
        with suppress(OSError, OverflowError, struct.error):
            return int(struct.unpack("=Q", os.pread(handle, 8, address))[0])
        return 0

    try:
        yield word
    finally:
        os.close(handle)
