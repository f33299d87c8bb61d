"""The orders in which stages run their forwards and backwards: one file a schedule, one line each below.

The runtime follows a schedule's lists of passes, the simulation prices them and the search bounds them; nothing else
knows what a schedule does.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import gpipe, one_f_one_b
from .passes import Pass, Run, Runs, expand, most_in_flight

__all__ = ["Pass", "Run", "Schedule", "arrays", "in_flight", "order"]

Integers = NDArray[np.int64]


class Schedule(StrEnum):
    """A schedule, by its name in files and options (Galvatron's)."""

    runs: Runs
    label: str  # for people

    def __new__(cls, name: str, label: str, runs: Runs) -> Schedule:
        member = str.__new__(cls, name)
        member._value_, member.label, member.runs = name, label, runs
        return member

    ONE_F_ONE_B = "pipedream_flush", "1F1B", one_f_one_b.runs
    GPIPE = "gpipe", "GPipe", gpipe.runs


def order(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Passes of a stage, in order."""
    return list(expand(schedule.runs(stage, stages, micro_batches)))


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Largest number of micro-batches whose activations a stage holds at once."""
    return most_in_flight(schedule.runs(stage, stages, micro_batches))


@lru_cache(maxsize=1024)
def arrays(schedule: Schedule, stages: int, micro_batches: int) -> tuple[Integers, Integers]:
    """The lists of all stages as the core takes them.

    Passes [P, 3]: kind (0: forward, 1: backward), chunk, micro-batch; and runs [R, 4] of them: stage, number of passes,
    times, step. Stages rise; each one's runs, and the passes of each run, are in order.
    """
    passes, rows = [], []
    for stage in range(stages):
        for run in schedule.runs(stage, stages, micro_batches):
            if run.times:
                rows.append((stage, len(run.passes), run.times, run.step))
                passes += [(one.kind == "backward", one.chunk, one.micro_batch) for one in run.passes]
    return np.array(passes, dtype=np.int64), np.array(rows, dtype=np.int64)
