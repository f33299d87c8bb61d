"""What the journal of a hardware profile holds of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...profiles import Collective, MessageGroup
from ..journal import Journal
from ..refine import falling
from ..stopwatch import WIDE, Timing

# Of the turns of a message, from how many per cent that are quicker the one that counts is. Unlike computation's, its
# time is not a processor's: whatever else a host does is in it, up to 6 ms beside 0.3. With the median, 129 plans with
# many messages were predicted up to 70 % too slow, with the lower quartile up to 12 %.
QUICKER = 25

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


def measured(journal: Journal) -> dict[MessageGroup, Turns]:
    """Every turn of every message that a journal knows."""
    found: dict[MessageGroup, Turns] = {}
    for key, laps_ms in journal.items("message "):
        group, mib, _ = MessagePoint.from_key(key)
        found.setdefault(group, {}).setdefault(mib, []).append(laps_ms)
    return found


def timings(turns: Turns) -> dict[float, Timing]:
    """Message in MiB -> its time."""
    return {mib: Timing.of_turns(laps, QUICKER) for mib, laps in turns.items()}


def doubtful(turns: Turns) -> set[float]:
    """Messages whose time spreads too widely or cannot be."""
    known = timings(turns)
    return {mib for mib, timing in known.items() if timing.spread > WIDE} | set(falling(known))
