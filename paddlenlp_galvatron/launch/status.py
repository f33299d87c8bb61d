"""The status of a rank, in memory shared with its launcher: updates are cheap, and it outlives the rank.

    with waiting("all_reduce"): ...      # the rank waits for others now; outside, others may wait for it

A rank without our launcher reports to nobody.
"""

import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

VARIABLE = "GALVATRON_STATUS"  # the descriptor of the memory, from a launcher to its rank
BYTES = 4096
LAYOUT = struct.Struct("<Biid160s3000sB")  # the outcome is written last: a reader that sees it sees the rest
# Words in messages of gloo and of Paddle's store about a lost or absent peer, and in gloo's about mismatched messages.
PEER_WORDS = ("gloo/transport/tcp", "Timed out waiting", "reset by peer", "TCP send error", "TCP receive error")
NCCL_PEER_WORDS = ("remote process exited", "unhandled system error", "Connection closed by remote peer")
MISFIT_WORDS = ("enforce fail", "Enforce failed", "EnforceNotMet")


BEFORE_STEPS = -1
FIRST_USE = "the first use of the group of"
CONNECTING = "the start of all ranks", "the making of the group of", FIRST_USE  # how these waits begin


class RankOutcome(IntEnum):
    """The outcome that a rank reported."""

    NONE = 0
    DONE = 1
    REFUSED = 2  # an error that the user can fix
    FAILED = 3
    LOST_A_PEER = 4  # the rank failed because another failed or never joined


@dataclass(frozen=True)
class RankStatus:
    """A rank's last status. Times are by the monotonic clock, which the processes of a node share."""

    began: bool = False
    outcome: RankOutcome = RankOutcome.NONE
    exit_code: int = 0
    step: int = BEFORE_STEPS
    since: float = 0.0  # start of its current activity, or its end
    waits_for: str = ""  # the collective in which it waits or failed; empty: it computes
    message: str = ""  # message of a failure


class RankStatusMemory:
    """The shared memory with one rank's status."""

    def __init__(self, descriptor: int | None = None):
        self.descriptor = os.memfd_create("galvatron-status") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, BYTES)
        self._memory = mmap.mmap(self.descriptor, BYTES)

    def write(self, status: RankStatus) -> None:
        texts = (_cut(status.waits_for, 160), _cut(status.message, 3000))
        numbers = (status.began, status.exit_code, status.step - BEFORE_STEPS, status.since)
        LAYOUT.pack_into(self._memory, 0, *numbers, *texts, status.outcome)

    def read(self) -> RankStatus:
        began, code, step, since, *texts, outcome = LAYOUT.unpack_from(self._memory)
        waits_for, message = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return RankStatus(bool(began), RankOutcome(outcome), code, step + BEFORE_STEPS, since, waits_for, message)

    def close(self) -> None:
        os.close(self.descriptor)
        self._memory.close()


def _cut(text: str, limit: int) -> bytes:
    return text.encode(errors="replace")[:limit]


@cache
def _memory() -> RankStatusMemory:
    """The memory that the launcher reads, from the environment; private without a launcher."""
    number = os.environ.pop(VARIABLE, "")  # child processes must not use it
    try:
        return RankStatusMemory(int(number) if number else None)
    except (OSError, ValueError):
        return RankStatusMemory()


_began = False
_step = BEFORE_STEPS
_waits: list[tuple[str, float]] = []  # outermost first, and since when
_failed_in = ""


def begin() -> None:
    """The work of this rank begins. From now on SIGUSR1 makes it write its stack to its log."""
    global _began
    _began = True
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    _write()


def enter(number: int) -> None:
    """Enter a step, counted from 0."""
    global _step
    _step = number
    _write()


def step() -> int:
    """The step that this rank is in."""
    return _step


def done(exit_code: int = 0) -> None:
    """All ranks have finished; this process will exit with this code."""
    _memory().write(RankStatus(True, RankOutcome.DONE, exit_code, _step, time.monotonic()))


def failed(outcome: RankOutcome, message: str, exit_code: int = 1, waited_in: str = "") -> None:
    """Record that this rank failed and will exit with this code. `waited_in`: the collective on its device, if that
    differs from the host's."""
    _memory().write(RankStatus(True, outcome, exit_code, _step, time.monotonic(), waited_in or _failed_in, message))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """This rank waits for others inside the context. May be nested: the status names the outermost wait and the
    step."""
    global _failed_in
    what += in_step(_step)
    _waits.append((what, time.monotonic()))
    if len(_waits) == 1:
        _write()
    try:
        yield
    except BaseException:
        _failed_in = what
        raise
    finally:
        _waits.pop()
        if not _waits:
            _write()


def in_step(number: int) -> str:
    """Suffix of a message about this step."""
    return "" if number == BEFORE_STEPS else f" in step {number + 1}"


def longest_wait() -> tuple[str, float] | None:
    """This rank's outermost current wait and its start by the monotonic clock."""
    waits = _waits[:1]  # a copy, as another thread may call
    return waits[0] if waits else None


def _write() -> None:
    _memory().write(RankStatus(_began, step=_step, since=time.monotonic(), waits_for=_waits[0][0] if _waits else ""))


def lost_a_peer(text: str) -> bool:
    """Whether an error, or the end of a log, reports a lost or missing peer."""
    if any(word in text for word in NCCL_PEER_WORDS):
        return True
    return any(word in text for word in PEER_WORDS) and not any(word in text for word in MISFIT_WORDS)
