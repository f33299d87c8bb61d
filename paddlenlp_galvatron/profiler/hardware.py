"""Measures the cluster through Paddle's collectives: what every rank of a launch runs.

All groups of a kind are active at once, as in training: on 4 ranks, both groups of two ranks.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ..plan.layout import Grid
from ..profiles import Collective, HardwareProfile, MessageGroup, Meta
from ..profiles.hardware import message_key
from ..runtime import collectives
from ..runtime.groups import Groups, Ranks, run_as_rank, start_world
from .launcher import fingerprint, report_progress
from .stopwatch import Array, Stopwatch, Timing

SIZES_MIB = (1 / 64, 1 / 16, 1 / 4, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 3  # everything is measured so often, so that what disturbs the machine for a while spoils one round only
LONGEST_MS = 30.0  # larger messages than the first that takes this long are not measured: they only get longer
FLOAT_BYTES = 4
OVERLAP_MIB = 4  # message of the overlap measurement
OVERLAP_MS = 50.0  # work of the overlap measurement: enough that starting a thread does not matter
MATRIX = 256  # side of the matrices that it multiplies

OPERATIONS: dict[Collective, Callable[[Any, Any], Any]] = {
    Collective.ALL_REDUCE: collectives.all_reduce,
    Collective.ALL_GATHER: collectives.all_gather,
    Collective.REDUCE_SCATTER: collectives.reduce_scatter,
    Collective.ALL_TO_ALL: collectives.all_to_all,
}


def group_kinds(world_size: int) -> list[tuple[int, bool]]:
    """(ranks, consecutive) of all groups to measure: every divisor, strided ones where that is another group."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return [(size, consecutive) for size in sizes for consecutive in (True, False) if consecutive or size < world_size]


@dataclass
class HardwareProfiler:
    """Measures one cluster. Every rank builds one and calls `measure`."""

    rank: int
    world_size: int
    stopwatch: Stopwatch
    groups: Groups
    largest_mib: float = SIZES_MIB[-1]
    _laps: dict[MessageGroup, dict[float, list[Array]]] = field(default_factory=dict)

    def measure(self, nodes: int = 1) -> HardwareProfile:
        """The whole profile; the same on every rank."""
        self.groups.create(set(self._communicators()))
        kinds = group_kinds(self.world_size)
        rows = [
            *(partial(self._measure_collective, MessageGroup(kind, *group)) for group in kinds for kind in OPERATIONS),
            *(partial(self._measure_send, size) for size, consecutive in kinds if consecutive),
        ]
        for number, row in enumerate(rows * ROUNDS):
            report_progress(number, ROUNDS * len(rows))
            row()
        overlap = self._measure_overlap() if self.world_size > 1 else Timing(1.0, 0.0)
        report_progress(ROUNDS * len(rows), ROUNDS * len(rows))
        return self._profile(nodes, overlap)

    def _communicators(self) -> Iterator[tuple[Ranks, str]]:
        for size, consecutive in group_kinds(self.world_size):
            yield from ((ranks, "") for ranks in Grid(self.world_size, size, consecutive).tp_groups())
            if consecutive:
                yield from ((pair, "down") for pair in self._pairs(size))

    def _pairs(self, stages: int) -> list[Ranks]:
        """Peers of neighbouring stages."""
        step = self.world_size // stages
        return [(rank, rank + step) for rank in range(self.world_size - step)]

    def _measure_collective(self, kind: MessageGroup) -> None:
        group = self.groups.get(Grid(self.world_size, kind.size, kind.consecutive).tp_group(self.rank))
        operation = OPERATIONS[kind.kind]

        def message(mib: float) -> Callable[[], Any]:
            elements = int(mib * 2**20) // FLOAT_BYTES // kind.size
            whole = elements if kind.kind is Collective.ALL_GATHER else elements * kind.size
            return partial(operation, paddle.zeros([whole]), group)

        self._measure_sizes(kind, message)

    def _measure_send(self, stages: int) -> None:
        """Every stage sends to the next and receives from the one before, all at once."""
        pairs = [(self.groups.get(pair, "down"), pair) for pair in self._pairs(stages) if self.rank in pair]

        def message(mib: float) -> Callable[[], None]:
            elements = int(mib * 2**20) // FLOAT_BYTES
            sent, received = paddle.zeros([elements]), paddle.empty([elements])

            def exchange() -> None:
                tasks = [
                    dist.isend(sent, second, group) if self.rank == first else dist.irecv(received, first, group)
                    for group, (first, second) in pairs
                ]
                for task in tasks:
                    task.wait()

            return exchange

        self._measure_sizes(MessageGroup(Collective.SEND, stages), message)

    def _measure_sizes(self, kind: MessageGroup, message: Callable[[float], Callable[[], Any]]) -> None:
        for mib in (size for size in SIZES_MIB if size <= self.largest_mib):
            laps = self.stopwatch.together(message(mib))
            self._laps.setdefault(kind, {}).setdefault(mib, []).append(laps)
            if Timing.of(laps).ms > LONGEST_MS:
                break

    def _measure_overlap(self) -> Timing:
        """How much slower compute and communication run beside one another.

        Work c and messages m, each for itself, then both at once: while both run, each goes 1/o as fast, until the
        shorter is done: both = o·min(c, m) + |c - m|.
        """
        group = self.groups.get(tuple(range(self.world_size)))
        matrix, buffer = paddle.ones([MATRIX, MATRIX]), paddle.zeros([OVERLAP_MIB * 2**20 // FLOAT_BYTES])

        def compute(count: int) -> None:
            for _ in range(count):
                paddle.matmul(matrix, matrix)

        def communicate(count: int) -> None:
            for _ in range(count):
                collectives.all_reduce(buffer, group)

        def time(operation: Callable[[], Any]) -> Timing:
            return Timing.of(self.stopwatch.together(operation))

        products = max(1, round(OVERLAP_MS / time(partial(compute, 1)).ms))
        messages = max(1, round(OVERLAP_MS / time(partial(communicate, 1)).ms))

        def both() -> None:
            beside = threading.Thread(target=communicate, args=(messages,))
            beside.start()
            compute(products)
            beside.join()

        coefficients = []
        for _ in range(ROUNDS):
            alone_ms = [time(partial(compute, products)).ms, time(partial(communicate, messages)).ms]
            short_ms, long_ms = sorted(alone_ms)
            coefficients.append(max(1.0, (time(both).ms - (long_ms - short_ms)) / short_ms))
        return Timing.of(np.array(coefficients))

    def _profile(self, nodes: int, overlap: Timing) -> HardwareProfile:
        allreduce: dict[tuple[int, bool], float] = {}
        p2p: dict[int, float] = {}
        spread = {"overlap_coe": overlap.spread}
        messages = {
            kind: {mib: Timing.of(np.concatenate(laps)) for mib, laps in sizes.items()}
            for kind, sizes in self._laps.items()
        }
        for kind, times in messages.items():
            largest = max(times)
            mib_per_ms = largest / times[largest].ms
            if kind.kind is Collective.ALL_REDUCE:
                allreduce[kind.size, kind.consecutive] = mib_per_ms * 2 * (kind.size - 1) / kind.size
                spread[f"allreduce_size_{kind.size}_consec_{int(kind.consecutive)}"] = times[largest].spread
            elif kind.kind is Collective.SEND:
                p2p[kind.size] = mib_per_ms
                spread[f"pp_size_{kind.size}"] = times[largest].spread
            spread |= {message_key(kind, mib): timing.spread for mib, timing in times.items()}
        return HardwareProfile(
            nodes,
            self.world_size // nodes,
            allreduce,
            p2p,
            {kind: {mib: timing.ms for mib, timing in times.items()} for kind, times in messages.items()},
            overlap.ms,
            Meta(fingerprint=fingerprint(self.world_size), spread=spread),
        )


@dataclass(frozen=True)
class HardwareOptions:
    """What a launch is asked for."""

    output: str  # folder of the files
    largest_mib: float = SIZES_MIB[-1]
    budget_ms: float = 150  # spent on each number


def main() -> None:
    """Measure, and write the files on the first rank."""
    options = HardwareOptions(**json.loads(sys.argv[1]))
    rank, world_size = start_world()
    stopwatch = Stopwatch(world_size, options.budget_ms / ROUNDS)
    profile = HardwareProfiler(rank, world_size, stopwatch, Groups(rank), options.largest_mib).measure()
    if rank == 0:
        profile.save(Path(options.output))


if __name__ == "__main__":
    sys.exit(run_as_rank(main))
