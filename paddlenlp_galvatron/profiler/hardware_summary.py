"""From the journal of a hardware profile to its files: medians, spreads, and what cannot be."""

from __future__ import annotations

from typing import NamedTuple

from ..profiles import Collective, Fingerprint, HardwareProfile, MessageGroup, Meta
from ..profiles.hardware import message_key
from ..profiles.network import traffic_factor
from .journal import Journal
from .refine import falling
from .stopwatch import Timing

WIDE = 0.3  # spread of a number that is measured again
GB_PER_S = 1e9 / 2**20 / 1e3  # in MiB/ms
OVERLAP = "overlap_coe"

Turns = dict[float, list[list[float]]]  # message in MiB -> ms of the laps of each turn


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


def message_turns(journal: Journal) -> dict[MessageGroup, Turns]:
    """Every lap of every message that the journal knows."""
    result: dict[MessageGroup, Turns] = {}
    for key, laps in journal.items("message "):
        group, mib, _ = MessagePoint.from_key(key)
        result.setdefault(group, {}).setdefault(mib, []).append(laps)
    return result


def timings(turns: Turns, shared: bool) -> dict[float, Timing]:
    """Message in MiB -> its time; `shared`: ranks share processors."""
    return {mib: Timing.of_turns(laps, shared) for mib, laps in turns.items()}


def doubtful(turns: Turns, shared: bool) -> set[float]:
    """Messages whose time spreads too widely or cannot be."""
    known = timings(turns, shared)
    return {mib for mib, timing in known.items() if timing.spread > WIDE} | set(falling(known))


def hardware_profile(
    journal: Journal,
    nodes: int,
    gpus_per_node: int,
    link_gb_per_s: float | None,
    fingerprint: Fingerprint,
    shared: bool = False,
) -> HardwareProfile:
    """The profile of all that the journal knows. A number that cannot be stands under "flags", with the reason."""
    bandwidth: dict[Collective, dict[tuple[int, bool], float]] = {Collective.ALL_REDUCE: {}, Collective.SEND: {}}
    spread: dict[str, float] = {}
    flags: dict[str, str] = {}
    known = {group: timings(turns, shared) for group, turns in message_turns(journal).items()}
    for group, times in known.items():
        spread |= {message_key(group, mib): timing.spread for mib, timing in times.items()}
        for mib, longer_ms in falling(times).items():
            flags[message_key(group, mib)] = f"{times[mib].ms:.3g} ms, but a smaller message takes {longer_ms:.3g} ms"
        largest = max(times)
        factor = 1.0 if group.kind is Collective.SEND else traffic_factor(group.kind, group.size)
        mib_per_ms = factor * largest / times[largest].ms
        key = message_key(group, largest)
        if group.kind in bandwidth:
            bandwidth[group.kind][group.size, group.consecutive] = mib_per_ms
            prefix = "pp" if group.kind is Collective.SEND else "allreduce"
            key = f"{prefix}_size_{group.size}" + (f"_consec_{int(group.consecutive)}" if prefix == "allreduce" else "")
            spread[key] = times[largest].spread
        if link_gb_per_s and mib_per_ms > link_gb_per_s * GB_PER_S:
            flags[key] = f"{mib_per_ms / GB_PER_S:.3g} GB/s, but the link carries {link_gb_per_s:g}"
    overlaps = [coefficient for _, coefficient in journal.items(OVERLAP)]
    overlap = Timing.of(overlaps or [1.0])
    if overlaps:
        spread[OVERLAP] = overlap.spread
    return HardwareProfile(
        nodes,
        gpus_per_node,
        bandwidth[Collective.ALL_REDUCE],
        {stages: mib_per_ms for (stages, _), mib_per_ms in bandwidth[Collective.SEND].items()},
        {group: {mib: timing.ms for mib, timing in times.items()} for group, times in known.items()},
        overlap.ms,
        Meta(fingerprint=fingerprint, spread=spread, flags=flags),
    )
