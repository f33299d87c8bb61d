"""What the journal of a hardware profile holds of messages, and which of it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...profiles import Collective, MessageGroup
from ..journal import Journal
from ..refine import falling
from ..stopwatch import Timing

NEAR = 1.25  # times the quickest reference message: ranks still stand as well as they ever did
ENOUGH = 5  # turns in which they do, for a number not to depend on one of them
WIDE = 0.3  # spread of a number that is measured again

Turns = dict[float, list[Sequence[float]]]  # message in MiB -> ms of the laps of each turn


class MessagePoint(NamedTuple):
    """One measurement, as it stands in the journal."""

    group: MessageGroup
    mib: float
    turn: int  # which of the repetitions at different times

    @property
    def key(self) -> str:
        return f"message {self.group.kind} {self.group.size} {int(self.group.consecutive)} {self.mib!r} {self.turn}"

    @classmethod
    def from_key(cls, key: str) -> MessagePoint:
        _, kind, size, consecutive, mib, turn = key.split()
        return cls(MessageGroup(Collective(kind), int(size), consecutive == "1"), float(mib), int(turn))


class Turn(NamedTuple):
    """What is measured of a message at one time."""

    reference_ms: float  # of the reference message just before, which tells how ranks are placed; 0 where none is sent
    laps_ms: Sequence[float]


class Messages:
    """Every turn of every message that a journal knows. Those count in which the host had the ranks' processors beside
    one another, as the reference message tells; where they are not enough, those that came next to it, too."""

    def __init__(self, journal: Journal):
        self._turns: dict[MessageGroup, dict[float, list[Turn]]] = {}
        for key, value in journal.items("message "):
            group, mib, _ = MessagePoint.from_key(key)
            self._turns.setdefault(group, {}).setdefault(mib, []).append(Turn(*value))
        references = [turn.reference_ms for sizes in self._turns.values() for turns in sizes.values() for turn in turns]
        self._near_ms = NEAR * min(references, default=0.0)

    @property
    def groups(self) -> list[MessageGroup]:
        return list(self._turns)

    def placed(self, group: MessageGroup, mib: float) -> int:
        """Number of turns in which the ranks' processors were beside one another."""
        return self._placed(self._turns.get(group, {}).get(mib, []))

    def counting(self, group: MessageGroup) -> Turns:
        """The turns that count."""
        result: Turns = {}
        for mib, turns in self._turns.get(group, {}).items():
            best = sorted(turns, key=lambda turn: turn.reference_ms)[: max(ENOUGH, self._placed(turns))]
            result[mib] = [turn.laps_ms for turn in best]
        return result

    @property
    def apart(self) -> float:
        """Share of the messages that have too few such turns."""
        lacking = [
            self._placed(turns) < min(ENOUGH, len(turns)) for sizes in self._turns.values() for turns in sizes.values()
        ]
        return lacking.count(True) / max(1, len(lacking))

    def _placed(self, turns: Sequence[Turn]) -> int:
        return sum(turn.reference_ms <= self._near_ms for turn in turns)


def timings(turns: Turns, shared: bool) -> dict[float, Timing]:
    """Message in MiB -> its time; `shared`: ranks share processors."""
    return {mib: Timing.of_turns(laps, shared) for mib, laps in turns.items()}


def doubtful(turns: Turns, shared: bool) -> set[float]:
    """Messages whose time spreads too widely or cannot be."""
    known = timings(turns, shared)
    return {mib for mib, timing in known.items() if timing.spread > WIDE} | set(falling(known))
