"""Prices messages by measured times of the group, else by bandwidth. Without measurements by NCCL's model of a
collective: its fastest algorithm and protocol, each latency + bytes / bandwidth.

Constants and formulas are those of NCCL's tuning (src/graph/tuning.cc of 2.28: base and hardware latencies, and
the shares of `ncclTopoTuneModel`), so that short messages cost the time of their steps, and not bandwidth alone. Left
out: its correction of trees for medium sizes, ceilings of a channel by chip, and switches that reduce across nodes.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from math import ceil, inf, log, log2
from typing import NamedTuple

from ..base import GB_PER_S, UserError, once
from ..plan.mesh import divisors
from .curves import Curve
from .data_sheet import DataSheet
from .files import Meta
from .hardware import Collective, HardwareProfile, MessageGroup

MESSAGES_MIB = (1 / 64, 1 / 4, 1.0, 8.0, 32.0, 128.0, 1024.0)


class Place(NamedTuple):
    """The placement of a group's ranks on nodes."""

    size: int  # ranks
    nodes: int = 1  # nodes that it spans
    consecutive: bool = True

    @property
    def per_node(self) -> float:
        """Ranks of the group on one node. The other ranks of the node are in equal groups, active at the same time."""
        return self.size / self.nodes


class Network:
    """Time of a collective for a placement. Monotone in the message's size; a group of one rank costs nothing."""

    def __init__(self, profile: HardwareProfile):
        self.profile = profile

    def collective_ms(self, kind: Collective, group: Place, mib: float, joined: bool = False) -> float:
        """Time in ms; `Collective` defines `mib`. Raises UserError if nothing was measured.

        `joined`: time that these bytes add to an existing message, so without latency.
        """
        if group.size == 1 or mib == 0:
            return 0.0
        curve = self._collective(kind, group)
        return curve(mib) - (curve.latency if joined else 0.0)

    def send_ms(self, stages: int, mib: float) -> float:
        """Time in ms of one rank's message to its peer in the next stage, all ranks of the stage sending."""
        if stages == 1 or mib == 0:
            return 0.0
        return self._send(stages)(mib)

    def receive_slowdown(self, stages: int) -> float:
        """Slowdown of a pass while the receive of the next is posted, which on a GPU occupies some of its
        multiprocessors."""
        return 1.0 if stages == 1 else self.profile.overlap_by_kind.get(Collective.SEND, 1.0)

    def tensor_share(self, stages: int) -> float:
        """Exposed time of tensor parallelism's collectives in a pass, in a pipeline of `stages` stages / their time
        alone."""
        return self.profile.tensor_shown * (1.0 if stages == 1 else self.profile.tensor_in_pipeline)

    def measured_place(self, size: int, consecutive: bool) -> Place:
        """Place of the group behind a key: ranks 0, 1, ... or ranks 0, W/n, 2 W/n, ... of the W measured ranks."""
        world, node = self.profile.world_size, self.profile.gpus_per_node
        if consecutive:
            return Place(size, ceil(size / node), True)
        return Place(size, len({rank * world // size // node for rank in range(size)}), False)

    @once
    def _collective(self, kind: Collective, group: Place) -> Curve:
        measured = self._measured(kind, group)
        if measured:
            return Curve.rising(measured)
        halves = self._measured(Collective.ALL_REDUCE, group)
        if halves and kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            # A ring all-reduce is a reduce-scatter and an all-gather of the same buffer.
            return Curve.rising((mib, ms / 2) for mib, ms in halves)
        latency = self._latency(kind, group)
        per_mib = traffic_factor(kind, group.size) / self.bandwidth_mib_per_ms(group)
        return Curve(((1.0, latency + per_mib), (2.0, latency + 2 * per_mib)))

    def _measured(self, kind: Collective, spread: Place) -> list[tuple[float, float]]:
        """Measured (MiB, ms) of a group at this place; inside a node a strided one may stand in for a consecutive."""
        groups = [MessageGroup(kind, spread.size, side) for side in (spread.consecutive, not spread.consecutive)]
        for group in groups:
            times = self.profile.messages_ms.get(group)
            if times and self.measured_place(group.size, group.consecutive).nodes == spread.nodes:
                return list(times.items())
        return []

    def _latency(self, kind: Collective, group: Place) -> float:
        """Time in ms of an empty message, from the measured group of the nearest size; 0 if none was measured."""
        sizes = {g.size: Curve.rising(t.items()) for g, t in self.profile.messages_ms.items() if g.kind is kind and t}
        return sizes[_nearest(sizes, group.size)].latency if sizes else 0.0

    def bandwidth_mib_per_ms(self, group: Place) -> float:
        """Bus bandwidth of a group (nccl-tests' definition), in MiB/ms.

        Inside a node: of the measured group of the nearest size. Across nodes: the node's link is shared by all groups
        that cross it at the same time, so a group's share grows with its ranks on the node; scaled by that from the
        measured group that is nearest in ranks a node. Never above the bandwidth inside a node.
        """
        inside, across = self._bandwidths
        if group.nodes == 1:
            if not inside:
                raise _unmeasured(group, "inside a node")
            best = min(
                inside, key=lambda p: (_distance(p.size, group.size), p.consecutive != group.consecutive, p.size)
            )
            return inside[best]
        if not across:
            raise _unmeasured(group, "across nodes")
        best = min(across, key=lambda p: (_distance(p.per_node, group.per_node), _distance(p.nodes, group.nodes), p))
        shared = across[best] * group.per_node / best.per_node
        return min(shared, max(inside.values(), default=shared))

    @cached_property
    def _bandwidths(self) -> tuple[dict[Place, float], dict[Place, float]]:
        """Measured bandwidths in MiB/ms: inside a node, and across nodes."""
        speeds = {self.measured_place(*key): speed for key, speed in self.profile.allreduce_mib_per_ms.items()}
        inside = {group: speed for group, speed in speeds.items() if group.nodes == 1}
        return inside, {group: speed for group, speed in speeds.items() if group.nodes > 1}

    @once
    def _send(self, stages: int) -> Curve:
        tables = {g.size: t for g, t in self.profile.messages_ms.items() if g.kind is Collective.SEND and t}
        if tables:
            return Curve.rising(tables[_nearest(tables, stages)].items())
        by_stages = self.profile.p2p_mib_per_ms
        if not by_stages:
            raise UserError(
                f"pp_size_{stages}: the bandwidth between {stages} pipeline stages was not measured; measure it with "
                "`galvatron profile hardware`, name the file by p2p_bandwidth_config_path, or search with max_pp_deg 1"
            )
        return Curve(((1.0, 1 / by_stages[_nearest(by_stages, stages)]),))


def traffic_factor(kind: Collective, size: int) -> float:
    """Bytes that every rank sends (and receives) per byte of message, by ring algorithms."""
    if kind is Collective.SEND:
        return 1.0
    others = (size - 1) / size
    return 2 * others if kind is Collective.ALL_REDUCE else others


def bandwidth_of(group: MessageGroup, times_ms: Mapping[float, float]) -> float:
    """Bandwidth of the largest message in MiB/ms; of a collective its bus bandwidth. `times_ms`: by MiB."""
    largest = max(times_ms)
    return traffic_factor(group.kind, group.size) * largest / times_ms[largest]


def _distance(a: float, b: float) -> float:
    return abs(log(a / b))


def _nearest(sizes: Iterable[int], wanted: int) -> int:
    return min(sizes, key=lambda size: (_distance(size, wanted), size))


def _unmeasured(group: Place, where: str) -> UserError:
    return UserError(
        f"allreduce_size_{group.size}_consec_{int(group.consecutive)}: no all-reduce {where} was measured; measure "
        f"this or another group {where} with `galvatron profile hardware`"
    )


class Protocol(StrEnum):
    """NCCL's protocols of data and flags."""

    LL = "LL"  # 4 bytes of data and 4 of flag: low latency, a fraction of the bandwidth
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
SWITCH_US = 25.0  # latency of an all-reduce by a node's switches
LL_ACROSS_NODES = 1.8  # factor on an LL step inside a node, if the group spans several
PLATEAU = 1.9  # factor on the latency of Simple in a long ring across nodes
TREE_SHARE = 0.92  # share of ring bandwidth
LL128_SHARE = 0.92  # slightly less than 120 / 128
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
        # A switch gets all, and a rank's part of the sums comes down and goes up again.
        if switch_mib_per_ms and nodes == 1:
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


def analytic_hardware(sheet: DataSheet, num_nodes: int, gpus_per_node: int | None = None) -> HardwareProfile:
    """Bandwidths and message times of a cluster of such nodes, with all links in use."""
    gpus = gpus_per_node or sheet.gpus_per_node
    world = num_nodes * gpus
    inside = sheet.link.value * sheet.link_efficiency.value * GB_PER_S
    node = sheet.network.value * sheet.network_efficiency.value * GB_PER_S
    adds = sheet.switch_efficiency
    switch = sheet.link.value * adds.value * GB_PER_S if adds else None
    groups = {(size, True): inside for size in divisors(gpus) if size > 1}
    if num_nodes > 1:
        groups[world, True] = min(node, inside)
    messages = {
        MessageGroup(kind, size, consecutive): {
            mib: collective_ms(kind, size, nodes, mib, bandwidth, sheet.half_ranks.value, switch)
            for mib in MESSAGES_MIB
        }
        for size, consecutive, nodes in _places(num_nodes, gpus)
        for kind, bandwidth in _bandwidths(size, nodes, gpus, inside, node)
    }
    p2p = {
        stages: inside if num_nodes == 1 else min(inside, node / min(world // stages, gpus))
        for stages in divisors(world)
        if stages > 1
    }
    messages |= {
        MessageGroup(Collective.SEND, stages): {
            mib: collective_ms(Collective.SEND, 2, min(num_nodes, 2), mib, bandwidth) for mib in MESSAGES_MIB
        }
        for stages, bandwidth in p2p.items()
    }
    return HardwareProfile(
        num_nodes,
        gpus,
        groups,
        p2p,
        messages,
        sheet.overlap_coe.value,
        Meta.derived(sheet, device_count=world),
        overlap_by_kind={Collective.SEND: sheet.receive_coe.value},
        tensor_in_pipeline=sheet.tensor_in_pipeline.value,
        tensor_shown=sheet.tensor_shown.value,
    )


def _bandwidths(size: int, nodes: int, gpus: int, inside: float, node: float) -> Iterator[tuple[Collective, float]]:
    """Bus bandwidth of each kind over `size` ranks on some nodes. All groups that cross a node's link at once share it.
    A ring crosses it once for all ranks of a node; in an all-to-all each rank sends its tokens for other nodes."""
    ring = inside if nodes == 1 else min(node * size / nodes / gpus, inside)
    yield from ((kind, ring) for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    crossing = nodes > 1 and (1 - 1 / nodes) / (1 - 1 / size)  # share of the bytes that a rank sends
    yield Collective.ALL_TO_ALL, min(node / gpus / crossing, inside) if crossing else inside


def _places(num_nodes: int, gpus: int) -> Iterator[tuple[int, bool, int]]:
    """Groups as (ranks, consecutive, nodes): ranks 0, 1, ..., and across nodes also 0, W/n, 2 W/n, ... of all W."""
    world = num_nodes * gpus
    for size in divisors(world)[1:]:
        yield size, True, -(-size // gpus)
        if num_nodes > 1 and size < world:
            yield size, False, len({rank * world // size // gpus for rank in range(size)})
