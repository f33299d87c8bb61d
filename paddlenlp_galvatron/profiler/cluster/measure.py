"""Measures the cluster through Paddle's collectives: what every rank of a launch runs.

All groups of a kind are active at once, as in training: on 4 ranks, both groups of two ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ...launch.nccl import slowed_by_a_receive
from ...plan.communicators import Ranks
from ...plan.mesh import Axis, Mesh
from ...profiles import Collective, MessageGroup
from ...runtime import collectives, device
from ...runtime.groups import Groups, run_as_rank, start_world
from ...runtime.precision import DTYPES
from ..clock import Array
from ..journal import Journal
from ..launcher import fingerprint, impossible_note, report_note, report_progress
from ..options import KINDS, HardwareOptions, HardwarePart
from ..refine import coarse, uncertain
from ..stopwatch import Stopwatch, Timing
from ..used import Used, note_used
from .messages import MessagePoint, Turns, doubtful, measured, timings
from .overlap import overlap_coefficient, overlapping_kinds, overlapping_ranks
from .summary import hardware_profile, overlap_key

ROUNDS = 3  # everything is measured so often, at different times
OVERLAPS = 6  # the overlap coefficient at least so often: one number of a few laps, 5 % off (standard deviation)
PINNED_ROUNDS = 10  # the same on pinned CPU processes of one host: what disturbs them spoils some rounds only
TOLERANCE = 0.05  # of a number: sizes in between are measured where a line through the others misses by more
LONGEST_MS = 200.0  # larger messages than the first that takes this long are not measured: they only get longer

OPERATIONS: dict[Collective, Callable[[Any, Any], Any]] = {
    Collective.ALL_REDUCE: collectives.all_reduce,
    Collective.ALL_GATHER: collectives.all_gather,
    Collective.REDUCE_SCATTER: collectives.reduce_scatter,
    Collective.ALL_TO_ALL: collectives.all_to_all,
}
OF_RANKS: dict[str, Callable[[Array], Array]] = {  # [laps, ranks] -> [laps]
    "min": lambda laps: np.max(laps, axis=1),
    "avg": lambda laps: np.mean(laps, axis=1),
    "first": lambda laps: laps[:, 0],
}


def group_kinds(world_size: int) -> list[tuple[int, bool]]:
    """(ranks, consecutive) of all groups to measure: every divisor, strided ones where that is another group."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return [(size, consecutive) for size in sizes for consecutive in (True, False) if consecutive or size < world_size]


def curves(options: HardwareOptions, world_size: int) -> list[MessageGroup]:
    """The collectives and groups of the parts that are asked for, each once."""
    found: dict[MessageGroup, None] = {}
    for part in options.parts:
        limit = {HardwarePart.P2P: options.max_pp_deg, HardwarePart.ALL_REDUCE: None}.get(part, options.max_tp_deg)
        for kind in KINDS[part]:
            for size, consecutive in group_kinds(world_size):
                if size <= (limit or size) and (consecutive or kind is not Collective.SEND):
                    found[MessageGroup(kind, size, consecutive)] = None
    return list(found)


@dataclass
class HardwareProfiler:
    """Measures one cluster into a journal. Every rank builds one and calls `measure`."""

    options: HardwareOptions
    rank: int
    world_size: int
    stopwatch: Stopwatch
    groups: Groups
    journal: Journal
    used: Used = field(default_factory=Used)

    def measure(self) -> None:
        """Measure all that the journal does not know."""
        self.groups.create(set(self._communicators()))
        if communicators := self.used.more_mib():
            note_used(self.journal, "communicator_mib", communicators / (len(self.groups.members) + 1))  # all ranks'
        wanted = curves(self.options, self.world_size)
        usual = PINNED_ROUNDS if self.stopwatch.pinned else ROUNDS
        rounds = self.options.turns or usual
        kinds = overlapping_kinds() if HardwarePart.OVERLAP in self.options.parts and self.world_size > 1 else []
        overlaps = [(kind, turn) for turn in range(self.options.turns or max(usual, OVERLAPS)) for kind in kinds]
        if overlaps and device.on_gpu():
            # By arithmetic: ranks are told how many channels to use by the plan that they train.
            slowed = slowed_by_a_receive(device.multiprocessors())
            self.journal.get(f"{overlap_key(Collective.SEND)} 0", lambda: slowed)
        done, total = 0, rounds * len(wanted) + len(overlaps)
        for turn in range(rounds):
            for group in wanted:
                report_progress(done, total)
                if not (self.stopwatch.is_late() and turn):
                    self._measure_curve(group, turn)
                done += 1
        for kind, turn in overlaps:
            report_progress(done, total)
            self.journal.get(f"{overlap_key(kind)} {turn}", partial(self._overlap, kind))
            done += 1
        for turn in range(rounds, rounds + ceil(rounds / 4)):  # what still spreads too widely, or cannot be
            if not self.stopwatch.is_late():
                for group in wanted:
                    for mib in sorted(doubtful(self._turns(group))):
                        self._measure_message(MessagePoint(group, mib, turn))
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

    def _measure_curve(self, group: MessageGroup, turn: int) -> None:
        """Times over message sizes. In the first turn it is found out which sizes are worth it."""
        grid = self.options.sizes_mib
        if turn:
            for mib in sorted(self._turns(group).keys() & set(grid)):
                self._measure_message(MessagePoint(group, mib, turn))
            return
        # Galvatron's own search reads these two kinds at every size.
        documented = group.consecutive and group.kind in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL)
        for mib in grid if documented or not self.options.adaptive else coarse(grid):
            if self._measure_message(MessagePoint(group, mib, turn)) > LONGEST_MS:
                break
        while not self.stopwatch.is_late() and (wanted := uncertain(grid, self._times(group), TOLERANCE)):
            for mib in wanted:
                self._measure_message(MessagePoint(group, mib, turn))

    def _turns(self, group: MessageGroup) -> Turns:
        return measured(self.journal).get(group, {})

    def _times(self, group: MessageGroup) -> dict[float, float]:
        return {mib: timing.ms for mib, timing in timings(self._turns(group)).items()}

    def _measure_message(self, point: MessagePoint) -> float:
        """Time in ms of a message in one turn."""

        def measure() -> list[float]:
            prepare = self._exchange if point.group.kind is Collective.SEND else self._collective
            laps = self.stopwatch.together(prepare(point.group, point.mib))
            of_ranks: list[float] = OF_RANKS[self.options.avg_or_min_or_first](laps).tolist()
            return of_ranks

        return Timing.of(self.journal.get(point.key, measure)).ms

    def _collective(self, group: MessageGroup, mib: float) -> Callable[[], Any]:
        mesh = Mesh.of(self.world_size, (Axis.TENSOR, group.size), consecutive=group.consecutive)
        communicator = self.groups.get(mesh.group(self.rank, Axis.TENSOR))
        elements = self._numbers(mib) // group.size
        whole = elements if group.kind is Collective.ALL_GATHER else elements * group.size
        return partial(OPERATIONS[group.kind], self._zeros(whole), communicator)

    def _exchange(self, group: MessageGroup, mib: float) -> Callable[[], None]:
        """Every stage sends to the next and receives from the one before, all at once."""
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
        return int(mib * 2**20) // self.options.precision.bytes

    def _zeros(self, count: int) -> Any:
        return paddle.zeros([count], DTYPES[self.options.precision])

    def _overlap(self, kind: Collective) -> float:
        return overlap_coefficient(
            self.stopwatch,
            self.rank,
            overlapping_ranks(self.world_size),
            self.groups,
            kind,
            self.options.precision,
            self.options.ranks_per_node,
            self.options.overlap_time_multiply,
        )


def main() -> None:
    """Measure, and write the files on the first rank."""
    options = HardwareOptions.model_validate_json(sys.argv[1])
    used = Used()
    rank, world_size = start_world()
    context = used.more_mib()
    device = fingerprint(world_size)
    per_node = options.ranks_per_node
    changing = options.model_dump(include={"num_nodes", "avg_or_min_or_first", "overlap_time_multiply", "budget_ms"})
    changing["dtype"] = options.precision.value
    journal = Journal.open(options.output, "hardware", device.model_dump() | changing, rank, world_size, options.fresh)
    report_note(*journal.kept_note)
    note_used(journal, "context_mib", context)
    stopwatch = Stopwatch(world_size, per_node, options.budget_ms, options.time_budget_s)
    HardwareProfiler(options, rank, world_size, stopwatch, Groups(rank), journal, used).measure()
    if rank == 0:
        profile = hardware_profile(journal, options.num_nodes, per_node, options.link_gb_per_s, device)
        report_note(*impossible_note(profile.meta))
        profile.save(options.output)


if __name__ == "__main__":
    run_as_rank(main)
