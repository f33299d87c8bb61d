"""Time of a collective by NCCL's own model: its fastest algorithm and protocol, each latency + bytes / bandwidth.

Constants and formulas are those by which NCCL chooses (src/graph/tuning.cc of 2.28: base and hardware latencies, and
the shares of `ncclTopoTuneModel`), so that short messages cost the time of their steps, and not bandwidth alone. Left
out: its correction of trees for medium sizes, ceilings of a channel by chip, and switches that reduce across nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from math import inf, log2

from .hardware import Collective
from .network import traffic_factor


class Protocol(StrEnum):
    """How data and flags travel."""

    LL = "LL"  # 4 bytes of data and 4 of flag: quick, a fraction of the bandwidth
    LL128 = "LL128"  # 120 bytes of data and 8 of flag
    SIMPLE = "Simple"  # large chunks with a fence: all of the bandwidth


# Microseconds: to start, and for one step over NVLink or the network.
RING_START_US = {Protocol.LL: 6.6, Protocol.LL128: 14.0, Protocol.SIMPLE: 8.4}
TREE_START_US = {Protocol.LL: 6.8, Protocol.LL128: 14.0, Protocol.SIMPLE: 8.4}
RING_STEP_US = {
    "nvlink": {Protocol.LL: 0.6, Protocol.LL128: 1.9, Protocol.SIMPLE: 3.4},
    "network": {Protocol.LL: 2.7, Protocol.LL128: 4.0, Protocol.SIMPLE: 14.0},
}
TREE_STEP_US = {
    "nvlink": {Protocol.LL: 0.6, Protocol.LL128: 1.25, Protocol.SIMPLE: 4.0},
    "network": {Protocol.LL: 5.0, Protocol.LL128: 8.5, Protocol.SIMPLE: 14.0},
}
SWITCH_US = 25.0  # of an all-reduce by the switches of a node
LL_ACROSS_NODES = 1.8  # a step of LL inside a node takes longer where the group spans several
PLATEAU = 1.9  # of a long ring across nodes: latency of Simple
TREE_SHARE = 0.92  # share of ring bandwidth
LL128_SHARE = 0.92  # 120 / 128, and a little
LL_SHARE_RING, LL_SHARE_TREE = 1 / 2, 1 / 3.8


def collective_ms(
    kind: Collective,
    ranks: int,
    nodes: int,
    mib: float,
    bus_mib_per_ms: float,
    half_ranks: float = inf,
    switch_mib_per_ms: float | None = None,
) -> float:
    """Time in ms of a message over ranks that `nodes` nodes share evenly.

    `mib` is as `Collective` defines it for the kind; `bus_mib_per_ms` the bandwidth that a large message reaches over
    few nodes, as nccl-tests reports it. A ring across nodes passes each rank's part on from rank to rank, and waits for
    the slowest: with `half_ranks` it reaches half of that bandwidth. Trees, of which the depth is a logarithm, keep it.
    `switch_mib_per_ms`: of a rank's link where the switches of a node add (NVLink SHARP).
    """
    if ranks == 1 or mib == 0:
        return 0.0
    if kind in (Collective.ALL_TO_ALL, Collective.SEND):  # sends to all others at once, by the Simple protocol
        start = RING_START_US[Protocol.SIMPLE] + RING_STEP_US["network" if nodes > 1 else "nvlink"][Protocol.SIMPLE]
        return start / 1e3 + mib * traffic_factor(kind, ranks) / bus_mib_per_ms
    falls = 1 + ranks / half_ranks if nodes > 1 else 1.0
    ways = [(us, factor * falls, share) for us, factor, share in _rings(kind, ranks, nodes, mib)]
    if kind is Collective.ALL_REDUCE:
        ways += _trees(ranks, nodes)
        if (
            switch_mib_per_ms and nodes == 1
        ):  # all is sent up, and a rank's part of the sums comes down and goes up again
            ways.append((SWITCH_US, 1 + 1 / ranks, switch_mib_per_ms / bus_mib_per_ms))
    return min(us / 1e3 + mib * factor / (bus_mib_per_ms * share) for us, factor, share in ways)


def _rings(kind: Collective, ranks: int, nodes: int, mib: float) -> Iterator[tuple[float, float, float]]:
    """Rings of each protocol: (latency in us, bytes sent for each of the message, share of the bandwidth)."""
    rounds = 2 if kind is Collective.ALL_REDUCE else 1
    across = rounds * (nodes - 1)
    inside = rounds * (ranks - 1) - across
    for protocol in Protocol:
        us = inside * _inside_us(protocol, nodes, RING_STEP_US) + across * RING_STEP_US["network"][protocol]
        us += RING_START_US[protocol]
        if protocol is Protocol.SIMPLE and nodes > 1 and rounds == 2 and mib >= ranks / 256:
            us *= PLATEAU
        share = {Protocol.LL: LL_SHARE_RING, Protocol.LL128: LL128_SHARE, Protocol.SIMPLE: 1.0}[protocol]
        yield us, traffic_factor(kind, ranks), share


def _trees(ranks: int, nodes: int) -> Iterator[tuple[float, float, float]]:
    """Trees of each protocol, as `_rings`: two, each with half of an all-reduce's message, up and down."""
    depth, chain = log2(nodes), ranks / nodes - 1
    for protocol in Protocol:
        us = TREE_START_US[protocol] + 2 * (
            chain * _inside_us(protocol, nodes, TREE_STEP_US) + depth * TREE_STEP_US["network"][protocol]
        )
        quick = {Protocol.LL: LL_SHARE_TREE, Protocol.LL128: LL128_SHARE, Protocol.SIMPLE: 1.0}[protocol]
        yield us, 2.0, TREE_SHARE * quick


def _inside_us(protocol: Protocol, nodes: int, steps: dict[str, dict[Protocol, float]]) -> float:
    return steps["nvlink"][protocol] * (LL_ACROSS_NODES if protocol is Protocol.LL and nodes > 1 else 1.0)
