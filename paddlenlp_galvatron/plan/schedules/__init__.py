"""The orders in which stages run their forwards and backwards: a function each in `orders`, a line each below.

The runtime follows a schedule's lists of passes, the simulation prices them and the search bounds them; nothing else
knows what a schedule does.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

import numpy as np

from .orders import gpipe, interleaved, one_f_one_b
from .passes import (
    ChunkedRuns,
    Done,
    Integers,
    Pass,
    Run,
    Runs,
    arrivals,
    expand,
    held_at_peaks,
    input_of,
    way_ms,
    without_repeats,
)

__all__ = [
    "Done",
    "Pass",
    "Run",
    "Schedule",
    "arrays",
    "arrivals",
    "chunks_in_flight",
    "in_flight",
    "input_of",
    "order",
    "way_ms",
    "without_repeats",
]


class Schedule(StrEnum):
    """A schedule, by its name in files and options (Galvatron's)."""

    label: str  # for people
    of_one_chunk: Runs
    of_chunks: ChunkedRuns | None  # of several chunks a stage; None: it has no such order

    def __new__(cls, name: str, label: str, runs: Runs, of_chunks: ChunkedRuns | None = None) -> Schedule:
        member = str.__new__(cls, name)
        member._value_, member.label, member.of_one_chunk, member.of_chunks = name, label, runs, of_chunks
        return member

    ONE_F_ONE_B = "pipedream_flush", "1F1B", one_f_one_b, interleaved
    GPIPE = "gpipe", "GPipe", gpipe

    def runs(self, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterable[Run]:
        """The runs of a stage, in order."""
        if chunks == 1:
            return self.of_one_chunk(stage, stages, micro_batches)
        assert self.of_chunks, f"{self} has one chunk a stage"
        return self.of_chunks(stage, stages, micro_batches, chunks)


def order(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """Passes of a stage, in order."""
    return list(expand(schedule.runs(stage, stages, micro_batches, chunks)))


def chunks_in_flight(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each chunk whose activations a stage holds at once, at every moment at which they may take most;
    with one chunk that is one number."""
    return _peaks(schedule, stages, micro_batches, chunks)[stage]


@lru_cache(maxsize=1024)
def _peaks(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Held passes at the peaks of all stages, which takes little longer than for one."""
    return held_at_peaks(*arrays(schedule, stages, micro_batches, chunks), chunks)


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Largest number of micro-batches whose activations a stage of one chunk holds at once."""
    [[most]] = chunks_in_flight(schedule, stage, stages, micro_batches)
    return most


@lru_cache(maxsize=1024)
def arrays(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Integers, Integers]:
    """The lists of all stages as the core takes them.

    Passes [P, 3]: kind (0: forward, 1: backward), chunk, micro-batch; and runs [R, 4] of them: stage, number of passes,
    times, step. Stages rise; each one's runs, and the passes of each run, are in order.
    """
    passes, rows = [], []
    for stage in range(stages):
        for run in schedule.runs(stage, stages, micro_batches, chunks):
            if run.times:
                rows.append((stage, len(run.passes), run.times, run.step))
                passes.append(run.passes)
    return np.concatenate(passes), np.array(rows, dtype=np.int64)
