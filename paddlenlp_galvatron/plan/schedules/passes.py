"""What a schedule is made of: each stage's list of passes, equal ones that follow each other written as one run.

A stage runs each micro-batch once forward and once backward through each of its chunks. A chunk's forwards come in the
order of the micro-batches, and so do backwards: messages between two stages are then needed in the order in which they
are sent. No stages wait for each other in a circle. Tests hold this, and the core refuses lists that break it.

Chunk c of stage s comes between chunk c of stage s - 1 and of stage s + 1; after the last stage comes chunk c + 1 of
the first. Where stages have one chunk it is 0; the runtime and the search know no more as yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Literal, NamedTuple


class Pass(NamedTuple):
    """One forward or backward pass of one micro-batch through one chunk of a stage's layers."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


class Run(NamedTuple):
    """Passes that follow each other `times` times; each time the micro-batches are `step` further."""

    passes: tuple[Pass, ...]
    times: int = 1
    step: int = 1


Runs = Callable[[int, int, int], Iterable[Run]]
"""A schedule: the runs of a stage, in order, given stage, number of stages and of micro-batches."""


def forward(micro_batch: int, chunk: int = 0) -> Pass:
    return Pass("forward", chunk, micro_batch)


def backward(micro_batch: int, chunk: int = 0) -> Pass:
    return Pass("backward", chunk, micro_batch)


def expand(runs: Iterable[Run]) -> Iterator[Pass]:
    """Every pass, in order."""
    for run in runs:
        for time in range(run.times):
            for kind, chunk, micro_batch in run.passes:
                yield Pass(kind, chunk, micro_batch + time * run.step)


def most_in_flight(runs: Iterable[Run]) -> int:
    """Largest number of micro-batches whose activations are held at once; a chunk holds an even share of a stage's."""
    held = most = last_chunk = 0
    for run in runs:
        changes = [*accumulate(1 if one.kind == "forward" else -1 for one in run.passes)]
        if run.times:
            more = changes[-1] * (run.times - 1)  # held before the run's last time, beyond what was before its first
            most = max(most, held + max(changes) + max(more, 0))
            held += more + changes[-1]
            last_chunk = max(last_chunk, *(one.chunk for one in run.passes))
    return -(-most // (last_chunk + 1))
