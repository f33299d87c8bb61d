"""Finds the faults of a node's ranks, and the root cause among the faults of all nodes."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from ..base.units import MIB
from .out_of_memory import EXIT_CODE as OUT_OF_MEMORY
from .out_of_memory import ended_out_of_memory, kernel_kills, peak_mib_in, reason_in
from .status import BEFORE_STEPS, CONNECTING, FIRST_USE, RankOutcome, RankStatus, RankStatusMemory, in_step, lost_a_peer

STOPPED_S = 20.0  # a rank stopped by a signal for longer has failed
IDLE_S = 5.0  # ranks that wait for a rank blame it after it has computed for this time
SETTLE_S = 0.5  # time for others to report an earlier failure
SEARCH_S = 3.0  # time to look for a cause when all failed ranks only lost a peer
WAIT_S = 1800.0  # timeout of ranks that wait for others: Paddle's limit of a group
WAIT_VARIABLE = "GALVATRON_WAIT_S"  # the same, from a launcher to its ranks
LOG_END_BYTES = MIB  # end of a rank's log to read; logs may grow for weeks
NAMED_RANKS = 6  # ranks named in a message
STRANGER = "; another program, such as a port scanner, may have connected to the ranks' ports"
FIRST_USE_S = 120.0  # limit when all ranks wait in a group's first use, which is fast unless a rank is late
STACK_S = 5.0  # time for a rank to write its stack


class FaultKind(IntEnum):
    """How likely a fault is the cause of the others."""

    CAUSE = 0
    STALL = 1  # the rank continues while others wait for it
    CONSEQUENCE = 2  # follows from another rank's failure
    LATE = 3  # timeout; another rank's fault explains it


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, or of a node where `rank` is None."""

    kind: FaultKind
    rank: int | None
    message: str  # its first line names the rank
    age_s: float = 0.0  # time since it happened, as nodes have different clocks
    exit_code: int = 1  # exit code of the command
    out_of_memory: bool = False
    peak_mib: float | None = None


@dataclass(frozen=True)
class Wait:
    """A rank's wait for others, which may have ended with their loss."""

    rank: int
    what: str  # operation, group and step
    age_s: float


@dataclass
class Rank:
    """A process of this node."""

    number: int
    process: subprocess.Popen[bytes]
    memory: RankStatusMemory
    log: Path
    node: int | None = None  # set where there are several nodes
    ended_at: float | None = None
    stopped_since: float | None = None
    _log_end: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.number}" + ("" if self.node is None else f" of node {self.node}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_end(self) -> str:
        """Reads the end of its log; only once after the rank has ended."""
        if self.alive:
            return read_end(self.log)
        if self._log_end is None:
            self._log_end = read_end(self.log)
        return self._log_end


def read_end(log: Path, start: int = 0) -> str:
    """Reads at most the last LOG_END_BYTES of a log, none before byte `start`."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - LOG_END_BYTES))
        return file.read(LOG_END_BYTES).decode(errors="replace")


def wait_limit_s() -> float:
    """Returns this rank's timeout for others, as set by its launcher."""
    return float(os.environ.get(WAIT_VARIABLE, WAIT_S))


class LocalRanks:
    """The ranks of this node."""

    def __init__(self, ranks: Sequence[Rank]):
        self.ranks = ranks
        self._kills_before = kernel_kills()

    @property
    def done(self) -> bool:
        """Whether all ranks have ended normally."""
        return all(rank.process.poll() == rank.memory.read().exit_code for rank in self.ranks)

    @property
    def lost_while_connecting(self) -> bool:
        """Whether a rank lost a peer before any rank began a step."""
        return any(_while_connecting(rank.memory.read()) for rank in self.ranks)

    def faults(self) -> list[Fault]:
        """Returns the faults so far."""
        statuses = [rank.memory.read() for rank in self.ranks]
        any_began = any(status.began for status in statuses)
        faults = [self._fault(*pair, any_began) for pair in zip(self.ranks, statuses, strict=True)]
        return [fault for fault in faults if fault]

    def stalled(self) -> list[Fault]:
        """Returns ranks that others may be waiting for: stopped by a signal, or computing."""
        now = time.monotonic()
        stalled = [self._stopped(rank, rank.memory.read()) for rank in self.ranks if rank.stopped_since is not None]
        running = [(rank, rank.memory.read()) for rank in self.ranks if rank.alive and rank.stopped_since is None]
        for rank, status in running:
            if status.began and not status.waits_for and not status.outcome and now - status.since >= IDLE_S:
                message = f"{rank.name} did not come to the others, who wait for it: it has computed for "
                message += f"{now - status.since:.0f} s{in_step(status.step)}; its log: {rank.log}"
                stalled.append(Fault(FaultKind.STALL, rank.number, message, now - status.since))
        return stalled

    def waits(self) -> list[Wait]:
        """Returns operations in which ranks wait for others, or lost them."""
        now, statuses = time.monotonic(), [(rank, rank.memory.read()) for rank in self.ranks]
        return [
            Wait(rank.number, status.waits_for, now - status.since)
            for rank, status in statuses
            if status.waits_for and (status.outcome is RankOutcome.LOST_A_PEER if status.outcome else rank.alive)
        ]

    def timed_out(self, limit_s: float, whole: bool = False) -> list[Fault]:
        """Returns ranks that have waited in one collective for longer than a limit. `whole`: these are all ranks of the
        launch, so no rank is late if all wait in a group's first use."""
        alive, waits = {rank.number: rank for rank in self.ranks if rank.alive}, self.waits()
        first = whole and len(waits) == len(self.ranks) and all(wait.what.startswith(FIRST_USE) for wait in waits)
        limit_s = min(limit_s, FIRST_USE_S) if first else limit_s
        late = [(alive[wait.rank].name, wait) for wait in waits if wait.rank in alive and wait.age_s > limit_s]
        message = "{} has waited for {:.0f} s in {}" + STRANGER * first
        return [
            Fault(FaultKind.CONSEQUENCE, wait.rank, message.format(name, wait.age_s, wait.what), wait.age_s)
            for name, wait in late
        ]

    def explain(self, fault: Fault) -> Fault:
        """Adds the current code line to the fault of a stalled rank of this node."""
        for rank in self.ranks:
            if rank.number == fault.rank and fault.kind is FaultKind.STALL and rank.alive:
                return replace(fault, message=f"{fault.message}; it is at {_place(rank)}")
        return fault

    def overdue(self, limit_s: float) -> list[Fault]:
        """Returns a fault that names the ranks that have not ended within a limit."""
        late = [rank for rank in self.ranks if rank.alive]
        numbers = ", ".join(str(rank.number) for rank in late)
        logs = late[0].log.parent if late else ""
        message = f"rank {numbers} did not end within {limit_s:.0f} s; logs: {logs}"
        return [Fault(FaultKind.LATE, late[0].number if late else None, message)]

    def _fault(self, rank: Rank, status: RankStatus, any_began: bool) -> Fault | None:
        now, code = time.monotonic(), rank.process.poll()
        if code is None:
            stopped = _state(rank.process.pid) == "T"
            rank.stopped_since = (rank.stopped_since or now) if stopped else None
            if stopped and now - (rank.stopped_since or now) >= STOPPED_S:
                return self._stopped(rank, status)
        else:
            rank.ended_at = rank.ended_at or now
        if status.outcome > RankOutcome.DONE:
            return self._reported(rank, status, code)
        if code is None or status.outcome is RankOutcome.DONE:
            return None
        return self._unreported(rank, status, code) if code or any_began else None

    def _stopped(self, rank: Rank, status: RankStatus) -> Fault:
        age = time.monotonic() - (rank.stopped_since or 0)
        message = f"{rank.name} was stopped by a signal (process {rank.process.pid}){in_step(status.step)} "
        message += "and did not continue for "
        return Fault(FaultKind.CAUSE, rank.number, f"{message}{age:.0f} s; its log: {rank.log}", age)

    def _reported(self, rank: Rank, status: RankStatus, code: int | None) -> Fault:
        kind = FaultKind.CONSEQUENCE if status.outcome is RankOutcome.LOST_A_PEER else FaultKind.CAUSE
        age = time.monotonic() - status.since
        if status.exit_code == OUT_OF_MEMORY or (code and ended_out_of_memory(code, rank.log_end(), self._oom_killed)):
            return self._memory(rank, age)
        if kind is FaultKind.CONSEQUENCE:
            message = f"{rank.name} lost another rank in {status.waits_for or 'a collective'}: {status.message}"
            message += STRANGER if _while_connecting(status) else ""
        elif status.outcome is RankOutcome.REFUSED:
            first, *rest = status.message.splitlines() or [""]
            message = "\n".join([f"{first} ({rank.name})", *rest])
        else:
            message = f"{rank.name} failed{in_step(status.step)}: {status.message}"
        return Fault(kind, rank.number, f"{message}; its log: {rank.log}", age, status.exit_code)

    def _unreported(self, rank: Rank, status: RankStatus, code: int) -> Fault:
        """Fault of a rank that ended without reporting one."""
        log_end = rank.log_end()
        age = time.monotonic() - (rank.ended_at or 0)
        if ended_out_of_memory(code, log_end, self._oom_killed):
            return self._memory(rank, age)
        lost = code in (1, -signal.SIGABRT) and lost_a_peer(log_end)
        lines = [line.strip() for line in log_end.splitlines() if line.strip()]
        last = f": {lines[-1]}" if lines and (code > 0 or code == -signal.SIGABRT) else ""
        how = f"ended with exit code {code}" + " before its work was done" * (not code)
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else how
        message = f"{rank.name} {how}{in_step(status.step)}{last}; its log: {rank.log}"
        return Fault(FaultKind.CONSEQUENCE if lost else FaultKind.CAUSE, rank.number, message, age)

    def _memory(self, rank: Rank, age: float) -> Fault:
        log_end = rank.log_end()
        message = f"{rank.name} ran out of memory{reason_in(log_end)}; its log: {rank.log}"
        return Fault(FaultKind.CAUSE, rank.number, message, age, 1, True, peak_mib_in(log_end))

    @property
    def _oom_killed(self) -> bool:
        return kernel_kills() > self._kills_before


def _while_connecting(status: RankStatus) -> bool:
    lost = status.outcome in (RankOutcome.NONE, RankOutcome.LOST_A_PEER) and status.step == BEFORE_STEPS
    return lost and status.waits_for.startswith(CONNECTING)


def _state(pid: int) -> str:
    """The state letter of proc(5): T if a signal stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _place(rank: Rank) -> str:
    """Makes the rank write its stack to its log; returns the innermost line."""
    log_bytes, end = rank.log.stat().st_size if rank.log.exists() else 0, time.monotonic() + STACK_S
    rank.process.send_signal(signal.SIGUSR1)
    while time.monotonic() < end:
        time.sleep(0.05)
        if frame := re.search(r"^ *(File .+)\n", read_end(rank.log, log_bytes), re.MULTILINE):
            return frame[1]
    return "a place that it does not name"


def with_waits(fault: Fault, waits: Iterable[Wait]) -> Fault:
    """Adds the waiting ranks and their operation: in a group with the faulty rank, the longest wait."""
    waits = [wait for wait in waits if wait.rank != fault.rank]
    if not waits or fault.exit_code != 1 or fault.out_of_memory:  # the fault explains itself
        return fault
    in_group = re.compile(rf"ranks [\d, ]*\b{fault.rank}\b")
    what = max(waits, key=lambda wait: (bool(in_group.search(wait.what)), wait.age_s)).what
    ranks = named(tuple(sorted({wait.rank for wait in waits if wait.what == what})))
    first, *rest = fault.message.splitlines()
    return replace(fault, message="\n".join([f"{first}; {ranks} waited in {what}", *rest]))


@lru_cache(maxsize=1024)
def named(ranks: tuple[int, ...]) -> str:
    """Names ranks, the first NAMED_RANKS of many."""
    more = ", …" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:NAMED_RANKS]))}{more}"


class FaultClassifier:
    """Finds the fault that caused the others, once the relevant faults have arrived."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._stalled: list[Fault] | None = None

    def verdict(
        self, faults: Sequence[Fault], stalled: Iterable[Fault], waits: Iterable[Wait] = (), all_present: bool = True
    ) -> Fault | None:
        """The fault that ends the launch; None: not yet. `all_present`: all nodes have joined."""
        waits = list(waits)
        fault = self._worst(faults, stalled, bool(waits), all_present)
        return fault and with_waits(fault, waits)

    def _worst(
        self, faults: Sequence[Fault], stalled: Iterable[Fault], waited_for: bool, all_present: bool
    ) -> Fault | None:
        if not faults:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first = now
        # The status at the first fault: later a rank that loses a peer also looks busy.
        if self._stalled is None:
            self._stalled = list(stalled)
        waited = now - self._first
        causes = [fault for fault in faults if fault.kind is FaultKind.CAUSE]
        if causes:
            return max(causes, key=lambda fault: fault.age_s) if waited >= SETTLE_S else None
        if waited < SEARCH_S or not all_present:
            return None
        held_up = waited_for or any(fault.kind is FaultKind.CONSEQUENCE for fault in faults)
        blamed = [fault for fault in self._stalled if held_up or fault.kind is FaultKind.CAUSE]
        return min([*blamed, *faults], key=lambda fault: (fault.kind, -fault.age_s))
