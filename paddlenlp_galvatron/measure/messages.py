"""Measures a cluster through Paddle's collectives, on every rank of `galvatron profile hardware`.

All groups of a kind communicate at once, as in training: on 4 ranks, both groups of two ranks.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ..base.units import GB_PER_S, MIB
from ..launch.gpus import slowed_by_a_receive
from ..plan import Axis, Mesh, Precision
from ..plan.communicators import Ranks
from ..plan.precision import NumberTypes
from ..profiles import Collective, HardwareProfile, MessageGroup, Meta
from ..profiles.curves import Curve
from ..profiles.hardware import message_key
from ..profiles.network import bandwidth_of
from ..runtime import collectives, device
from ..runtime.device import pinned
from ..runtime.groups import Groups, run_as_rank, start_world
from ..runtime.precision import on_device
from .journal import Journal, Used, note_used, used_of
from .launcher import meta_of_rank, report_note, report_progress, spread_notes
from .options import KINDS, HardwareOptions, HardwarePart, thinned
from .stopwatch import MOST_ROUNDS, Stopwatch, Timing, needs_round

# Messages larger than the first that takes this long are not measured: only bandwidth sets their time. Factor between
# the sizes that are measured; times in between are interpolated. For a model of six layers on 4 ranks and 8 memory
# budgets, these sizes led to plans within 0.01 % of those by every size up to 256 MiB.
LONGEST_MS, STEP = 20.0, 4
# Percentile of a message's rounds to report. A message's time includes other work of the host, up to 6 ms instead of
# 0.3. With the median, 129 plans with many messages were predicted up to 70 % too slow; now 12 %.
QUICKER = 25
OVERLAP = "overlap_coe"

OPERATIONS: dict[Collective, Callable[[Any, Any], Any]] = {
    Collective.ALL_REDUCE: collectives.all_reduce,
    Collective.ALL_GATHER: collectives.all_gather,
    Collective.REDUCE_SCATTER: collectives.reduce_scatter,
    Collective.ALL_TO_ALL: collectives.all_to_all,
}
# Size of a message in training: the weights of one or several layers. On a GPU smaller messages end before the host has
# launched the computation to overlap.
MESSAGE_MIB, GPU_MESSAGE_MIB = 4, 128
ALONE_MS = 50.0  # duration of communication alone, long enough to hide its start
SAMPLES = 6  # disturbances only add time, so the fastest counts
MATRIX, GPU_MATRIX = 256, 4096  # side of the matrices: a product takes about 1 ms

# Collectives that training starts and waits for later. The all-reduce comes first: its coefficient is Galvatron's one.
STARTED: dict[Collective, Callable[[Any, Any], collectives.Pending]] = {
    Collective.ALL_REDUCE: collectives.all_reduce_start,
    Collective.ALL_GATHER: collectives.all_gather_start,
    Collective.REDUCE_SCATTER: collectives.reduce_scatter_start,
}
Rounds = dict[float, list[list[float]]]  # message in MiB -> samples of each round, ms


def group_kinds(world_size: int) -> list[tuple[int, bool]]:
    """(ranks, consecutive) of all groups: every divisor, and strided groups where they differ."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return [(size, consecutive) for size in sizes for consecutive in (True, False) if consecutive or size < world_size]


def measured_groups(options: HardwareOptions, on_gpus: bool) -> list[MessageGroup]:
    """Collectives and groups of the requested parts, each once. On the CPUs of one host the order of ranks does not
    matter: strided groups use the times of consecutive groups."""
    message_groups: dict[MessageGroup, None] = {}
    for section in options.parts:
        limit = {HardwarePart.P2P: options.max_pp_deg, HardwarePart.ALL_REDUCE: None}.get(section, options.max_tp_deg)
        for kind in KINDS[section]:
            for size, consecutive in group_kinds(options.world_size):
                strided = (on_gpus or options.num_nodes > 1) and kind is not Collective.SEND
                if size <= (limit or size) and (consecutive or strided):
                    message_groups[MessageGroup(kind, size, consecutive)] = None
    return list(message_groups)


def rounds_of(journal: Journal) -> dict[MessageGroup, Rounds]:
    """Every message that a journal knows."""
    by_group: dict[MessageGroup, Rounds] = {}
    for (kind, size, consecutive, mib), rounds in journal.rounds("message").items():
        by_group.setdefault(MessageGroup(Collective(kind), int(size), consecutive == "1"), {})[float(mib)] = rounds
    return by_group


def message_round(group: MessageGroup, mib: float, number: int) -> str:
    """Key of a round in the journal."""
    return f"message {group.kind} {group.size} {int(group.consecutive)} {mib!r} {number}"


def overlap_key(kind: Collective) -> str:
    """Key of a kind's overlap coefficient and spread in the journal; the all-reduce uses Galvatron's key."""
    return OVERLAP if kind is Collective.ALL_REDUCE else f"{OVERLAP}_{kind}"


def overlapping_kinds() -> list[Collective]:
    """The kinds to measure: on CPU only all-reduce, as gloo completes other messages in the call that starts them."""
    return list(STARTED) if device.on_gpu() else [Collective.ALL_REDUCE]


def overlapping_ranks(world_size: int) -> Ranks:
    """The ranks that measure it. On GPUs all ranks, as messages of more ranks occupy more of each GPU. On CPU a pair,
    each pinned to a processor, as the computing processor also copies messages, for any number of ranks; other ranks
    wait, so that no processor is shared."""
    return tuple(range(world_size if device.on_gpu() else min(world_size, 2)))


def message_mib() -> int:
    """Size of the messages that are measured."""
    return GPU_MESSAGE_MIB if device.on_gpu() else MESSAGE_MIB


def overlap_coefficient(
    stopwatch: Stopwatch, rank: int, ranks: Ranks, groups: Groups, kind: Collective, precision: Precision, per_node: int
) -> float:
    """Times work of c ms alone, messages of m ms alone, and both at once, in training's types: it starts a message,
    does some of the work, starts the next message, and finally waits for all. `per_node` of the `ranks` are on each
    host.

    While both run, each goes 1/o as fast, until the shorter is done: both = o·min(c, m) + |c - m|. Solved for o.
    """
    takes_part, numbers = rank in ranks, on_device(NumberTypes.of(precision))
    group = groups.get(ranks) if takes_part else None
    side = GPU_MATRIX if device.on_gpu() else MATRIX
    matrix = paddle.ones([side, side], numbers.computed.dtype)
    whole = message_mib() * MIB // precision.bytes
    tensor = paddle.zeros([whole // (len(ranks) if kind is Collective.ALL_GATHER else 1)], numbers.sent.dtype)
    start = partial(STARTED[kind], tensor, group)

    def compute(count: int) -> None:
        for _ in range(count if takes_part else 0):
            paddle.matmul(matrix, matrix)

    def communicate(count: int) -> None:
        for _ in range(count if takes_part else 0):
            start().wait()

    local = min(per_node, len(ranks))
    with pinned(rank % per_node, local, wanted=not device.on_gpu()):
        compute(1)
        communicate(1)
        products = max(1, round(ALONE_MS / stopwatch.once(partial(compute, 1))))
        messages = max(1, round(ALONE_MS / stopwatch.once(partial(communicate, 1))))

        def both() -> None:
            under_way = []
            for number in range(messages):
                under_way += [start()] if takes_part else []
                compute(products * (number + 1) // messages - products * number // messages)
            for message in under_way:
                message.wait()

        work = partial(compute, products), partial(communicate, messages), both
        samples = [[stopwatch.once(operation) for operation in work] for _ in range(SAMPLES)]
    *alone, both_ms = np.min(samples, axis=0)
    short, long = sorted(alone)
    return max(1.0, float((both_ms - (long - short)) / short))


@dataclass
class HardwareProfiler:
    """Measures one cluster into a journal. Every rank builds one and calls `measure`."""

    options: HardwareOptions
    rank: int
    stopwatch: Stopwatch
    groups: Groups
    journal: Journal
    used: Used = field(default_factory=Used)

    @property
    def world_size(self) -> int:
        return self.options.world_size

    def measure(self) -> None:
        """Measure everything that is not in the journal."""
        self.groups.create(set(self._communicators()))
        if communicators := self.used.more_mib():
            note_used(self.journal, "communicator_mib", communicators / (len(self.groups.members) + 1))  # all ranks'
        wanted = measured_groups(self.options, device.on_gpu())
        rounds = self.options.turns or MOST_ROUNDS
        kinds = overlapping_kinds() if HardwarePart.OVERLAP in self.options.parts and self.world_size > 1 else []
        if kinds and device.on_gpu():
            # By arithmetic, as ranks choose the number of channels by the plan that they train.
            slowed = slowed_by_a_receive(device.multiprocessors())
            self.journal.get(f"{overlap_key(Collective.SEND)} 0", lambda: slowed)
        done, total = 0, rounds * (len(wanted) + len(kinds))
        for number in range(rounds):
            for kind in kinds:
                if not (number and self.stopwatch.is_late()):
                    self.journal.get(f"{overlap_key(kind)} {number}", partial(self._overlap, kind))
            for group in wanted:
                report_progress(done, total)
                if not (number and self.stopwatch.is_late()):
                    self._measure_round(group, number)
                done += 1
            done += len(kinds)
        report_progress(total, total)

    def _communicators(self) -> Iterator[tuple[Ranks, str]]:
        if self.world_size > 1:
            yield overlapping_ranks(self.world_size), ""
        for size, consecutive in group_kinds(self.world_size):
            mesh = Mesh.of(self.world_size, (Axis.TENSOR, size), consecutive=consecutive)
            yield from ((tuple(ranks), "") for ranks in mesh.groups(Axis.TENSOR).tolist())
            if consecutive:
                yield from ((pair, "down") for pair in self._pairs(size))

    def _pairs(self, stages: int) -> list[Ranks]:
        """Peers of neighbouring stages."""
        step = self.world_size // stages
        return [(rank, rank + step) for rank in range(self.world_size - step)]

    def _measure_round(self, group: MessageGroup, number: int) -> None:
        """One round of each message of a group that needs another round."""
        by_size = rounds_of(self.journal).get(group, {})
        sizes = self.options.sizes_mib
        for mib in thinned(sizes, STEP) if self.options.adaptive else sizes:
            rounds = by_size.get(mib, [])
            if len(rounds) == number and (number == 0 or self.options.turns or needs_round(rounds)):
                measure = partial(self._samples, group, mib)
                rounds = [*rounds, self.journal.get(message_round(group, mib, number), measure)]
            if not rounds or Timing.of_rounds(rounds).ms > LONGEST_MS:
                break

    def _samples(self, group: MessageGroup, mib: float) -> list[float]:
        """Times of a message in ms; the slowest rank counts."""
        prepare = self._exchange if group.kind is Collective.SEND else self._collective
        samples: list[float] = np.max(self.stopwatch.time_collective(prepare(group, mib)), axis=1).tolist()
        return samples

    def _collective(self, group: MessageGroup, mib: float) -> Callable[[], Any]:
        mesh = Mesh.of(self.world_size, (Axis.TENSOR, group.size), consecutive=group.consecutive)
        communicator = self.groups.get(mesh.group(self.rank, Axis.TENSOR))
        elements = self._numbers(mib) // group.size
        whole = elements if group.kind is Collective.ALL_GATHER else elements * group.size
        return partial(OPERATIONS[group.kind], self._zeros(whole), communicator)

    def _exchange(self, group: MessageGroup, mib: float) -> Callable[[], None]:
        """Every stage sends to the next and receives from the previous stage, all at once."""
        pairs = [(self.groups.get(pair, "down"), pair) for pair in self._pairs(group.size) if self.rank in pair]
        sent, received = (self._zeros(self._numbers(mib)) for _ in range(2))

        def exchange() -> None:
            tasks = [
                dist.isend(sent, second, pair) if self.rank == first else dist.irecv(received, first, pair)
                for pair, (first, second) in pairs
            ]
            for task in tasks:
                task.wait()

        return exchange

    def _numbers(self, mib: float) -> int:
        return int(mib * MIB) // self.options.precision.bytes

    def _zeros(self, count: int) -> Any:
        return paddle.zeros([count], self.options.precision.dtype)

    def _overlap(self, kind: Collective) -> float:
        ranks, options = overlapping_ranks(self.world_size), self.options
        arguments = self.stopwatch, self.rank, ranks, self.groups, kind, options.precision, options.ranks_per_node
        return overlap_coefficient(*arguments)


def hardware_profile(journal: Journal, options: HardwareOptions, meta: Meta) -> HardwareProfile:
    """The profile from the whole journal. A bandwidth above the link's is listed under "flags"."""
    bandwidth: dict[Collective, dict[tuple[int, bool], float]] = {Collective.ALL_REDUCE: {}, Collective.SEND: {}}
    messages: dict[MessageGroup, dict[float, float]] = {}
    spread: dict[str, float] = {}
    flags: dict[str, str] = {}
    for group, by_size in rounds_of(journal).items():
        times = {mib: Timing.of_rounds(rounds, QUICKER) for mib, rounds in by_size.items()}
        spread |= {message_key(group, mib): timing.spread for mib, timing in times.items()}
        messages[group] = {mib: timing.ms for mib, timing in times.items()}
        largest = max(times)
        mib_per_ms = bandwidth_of(group, messages[group])
        key = message_key(group, largest)
        if group.kind in bandwidth:
            bandwidth[group.kind][group.size, group.consecutive] = mib_per_ms
            prefix = "pp" if group.kind is Collective.SEND else "allreduce"
            key = f"{prefix}_size_{group.size}" + (f"_consec_{int(group.consecutive)}" if prefix == "allreduce" else "")
            spread[key] = times[largest].spread
        if options.link_gb_per_s and mib_per_ms > options.link_gb_per_s * GB_PER_S:
            flags[key] = f"{mib_per_ms / GB_PER_S:.3g} GB/s, but the link carries {options.link_gb_per_s:g}"
        if group.consecutive and group.kind in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL):
            # Galvatron's own search reads these two at every size.
            curve = Curve.rising(messages[group].items())
            messages[group] |= {mib: curve(mib) for mib in options.sizes_mib if 1 <= mib < largest and mib not in times}
    all_reduce = bandwidth[Collective.ALL_REDUCE]
    if options.num_nodes == 1:  # unmeasured strided groups take the times of consecutive ones
        all_reduce |= {
            (size, False): all_reduce.get((size, False), all_reduce[size, True])
            for size, consecutive in group_kinds(options.world_size)
            if not consecutive and (size, True) in all_reduce
        }
    overlaps: dict[Collective, float] = {}
    for kind in Collective:
        if rounds := [coefficient for _, coefficient in journal.items(f"{overlap_key(kind)} ")]:
            overlap = Timing.of_samples(rounds)
            overlaps[kind], spread[overlap_key(kind)] = overlap.ms, overlap.spread
    return HardwareProfile(
        options.num_nodes,
        options.ranks_per_node,
        all_reduce,
        {stages: mib_per_ms for (stages, _), mib_per_ms in bandwidth[Collective.SEND].items()},
        messages,
        overlaps.pop(Collective.ALL_REDUCE, 1.0),
        meta.model_copy(update={"spread": spread, "flags": flags}).with_extra({}, **used_of(journal)),
        overlap_by_kind=overlaps,
    )


def main() -> None:
    """Measure, and write the files on the first rank."""
    options = HardwareOptions.model_validate_json(sys.argv[1])
    used = Used()
    rank, world_size = start_world()
    context_mib = used.more_mib()
    meta = meta_of_rank(world_size)
    changing = {"num_nodes": options.num_nodes, "budget_ms": options.budget_ms, "dtype": options.precision.value}
    identity = meta.fingerprint.model_dump() | changing
    journal = Journal.open(options.output, "hardware", identity, rank, world_size, options.fresh)
    report_note(*journal.kept_note)
    note_used(journal, "context_mib", context_mib)
    stopwatch = Stopwatch(world_size, options.ranks_per_node, options.budget_ms, options.time_budget_s)
    HardwareProfiler(options, rank, stopwatch, Groups(rank), journal, used).measure()
    if rank == 0:
        profile = hardware_profile(journal, options, meta)
        report_note(*spread_notes(profile.meta))
        profile.save(options.output)


if __name__ == "__main__":
    run_as_rank(main)
