"""The status of a rank, in memory shared with its launcher: it costs nothing and outlives the rank.

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
LAYOUT = struct.Struct("<Biid160s3000sB")  # the outcome last: a reader that sees it sees the rest
# Words in messages of gloo and of Paddle's store about a peer that has gone or does not come; and words in
# gloo's about messages that do not fit together.
PEER_WORDS = ("gloo/transport/tcp", "Timed out waiting", "reset by peer", "TCP send error", "TCP receive error")
NCCL_PEER_WORDS = ("remote process exited", "unhandled system error", "Connection closed by remote peer")
MISFIT_WORDS = ("enforce fail", "Enforce failed", "EnforceNotMet")


BEFORE_STEPS = -1
FIRST_USE = "the first use of the group of"
CONNECTING = "the start of all ranks", "the making of the group of", FIRST_USE  # how these waits begin


class RankOutcome(IntEnum):
    """The outcome of a rank's work, as it reported it."""

    NONE = 0
    DONE = 1
    REFUSED = 2  # an error for the user, who can mend it
    FAILED = 3
    LOST_A_PEER = 4  # the rank failed as another one failed or never joined


@dataclass(frozen=True)
class RankStatus:
    """A rank's last status. Times are by the monotonic clock, which the processes of a node share."""

    began: bool = False
    outcome: RankOutcome = RankOutcome.NONE
    exit_code: int = 0
    step: int = BEFORE_STEPS
    since: float = 0.0  # start of its present work, or its end
    waits_for: str = ""  # the collective that it waits in, or failed in; empty: it computes
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
    """The memory that the launcher reads, by the environment; without a launcher, nobody reads it."""
    number = os.environ.pop(VARIABLE, "")  # a process that this one starts has no part in it
    try:
        return RankStatusMemory(int(number) if number else None)
    except (OSError, ValueError):
        return RankStatusMemory()


_began = False
_step = BEFORE_STEPS
_waits: list[tuple[str, float]] = []  # outermost first, and since when
_failed_in = ""


def begin() -> None:
    """The work of this rank begins. From here on SIGUSR1 lets it write to its log where it is."""
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
    """The rank has ended, with all others, and its process will with this code."""
    _memory().write(RankStatus(True, RankOutcome.DONE, exit_code, _step, time.monotonic()))


def failed(outcome: RankOutcome, message: str, exit_code: int = 1, waited_in: str = "") -> None:
    """Record that this rank failed, and will end with an exit code. `waited_in`: its device's work, where that differs
    from its own."""
    _memory().write(RankStatus(True, outcome, exit_code, _step, time.monotonic(), waited_in or _failed_in, message))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Meanwhile this rank waits for others. May be nested: the status names the outermost, and the step."""
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
    """Follows a message about this step."""
    return "" if number == BEFORE_STEPS else f" in step {number + 1}"


def longest_wait() -> tuple[str, float] | None:
    """This rank's longest wait now, and its start by the monotonic clock."""
    waits = _waits[:1]  # a copy, as another thread may call
    return waits[0] if waits else None


def _write() -> None:
    _memory().write(RankStatus(_began, step=_step, since=time.monotonic(), waits_for=_waits[0][0] if _waits else ""))


def lost_a_peer(text: str) -> bool:
    """Whether an error, or the end of a log, reports a lost or missing peer."""
    if any(word in text for word in NCCL_PEER_WORDS):
        return True
    return any(word in text for word in PEER_WORDS) and not any(word in text for word in MISFIT_WORDS)
