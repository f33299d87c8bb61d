"""From the journal of a hardware profile to its files: medians, spreads, and what cannot be."""

from __future__ import annotations

from ...profiles import Collective, Fingerprint, HardwareProfile, Meta
from ...profiles.hardware import message_key
from ...profiles.network import traffic_factor
from ..journal import Journal
from ..refine import falling
from ..stopwatch import Timing
from ..used import used_of
from .messages import measured, timings

GB_PER_S = 1e9 / 2**20 / 1e3  # in MiB/ms
OVERLAP = "overlap_coe"


def overlap_key(kind: Collective) -> str:
    """Of a kind's coefficients in the journal and of their spread; the all-reduce has Galvatron's own."""
    return OVERLAP if kind is Collective.ALL_REDUCE else f"{OVERLAP}_{kind}"


def hardware_profile(
    journal: Journal,
    nodes: int,
    gpus_per_node: int,
    link_gb_per_s: float | None,
    fingerprint: Fingerprint,
) -> HardwareProfile:
    """The profile of all that the journal knows. A number that cannot be stands under "flags", with the reason."""
    bandwidth: dict[Collective, dict[tuple[int, bool], float]] = {Collective.ALL_REDUCE: {}, Collective.SEND: {}}
    spread: dict[str, float] = {}
    flags: dict[str, str] = {}
    known = {group: timings(turns) for group, turns in measured(journal).items()}
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
    overlaps: dict[Collective, float] = {}
    for kind in Collective:
        if found := [coefficient for _, coefficient in journal.items(f"{overlap_key(kind)} ")]:
            overlap = Timing.of(found)
            overlaps[kind], spread[overlap_key(kind)] = overlap.ms, overlap.spread
    return HardwareProfile(
        nodes,
        gpus_per_node,
        bandwidth[Collective.ALL_REDUCE],
        {stages: mib_per_ms for (stages, _), mib_per_ms in bandwidth[Collective.SEND].items()},
        {group: {mib: timing.ms for mib, timing in times.items()} for group, times in known.items()},
        overlaps.pop(Collective.ALL_REDUCE, 1.0),
        Meta(fingerprint=fingerprint, spread=spread, flags=flags).with_extra({}, **used_of(journal)),
        overlap_by_kind=overlaps,
    )
