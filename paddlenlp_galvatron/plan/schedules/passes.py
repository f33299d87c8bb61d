"""What a schedule is made of: each stage's list of passes, equal ones that follow each other written as one run.

A stage runs each micro-batch once forward and once backward through each of its chunks. A chunk's forwards come in the
order of the micro-batches, and so do backwards: messages between two stages are then needed in the order in which they
are sent. No stages wait for each other in a circle. Tests hold this, and the core refuses lists that break it.

Chunk c of stage s comes between chunk c of stage s - 1 and of stage s + 1; after the last stage comes chunk c + 1 of
the first. Where stages have one chunk it is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

ChunkedRuns = Callable[[int, int, int, int], Iterable[Run]]
"""The same of a schedule for several chunks a stage; the last number is theirs."""


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


def without_repeats(runs: Iterable[Run], chunks: int) -> Iterator[Pass]:
    """Every pass, in order, but that a run of as many forwards as backwards of every chunk is repeated four times at
    most: before the first and the last of them, between these, and after them a stage then holds what it always does.
    """
    for run in runs:
        each = Counter((kind, chunk) for kind, chunk, _ in run.passes)
        even = len(each) == 2 * chunks and len(set(each.values())) == 1
        yield from expand([run._replace(times=min(run.times, 4)) if even else run])


def held_at_peaks(runs: Iterable[Run], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each chunk whose activations are held at once, at every moment at which, whatever those of a
    chunk take, they may take most."""
    held, moments = [0] * chunks, list[tuple[int, ...]]()
    for run in runs:
        for time in range(min(run.times, 2)):  # the first and the last: in between, what is held lies between
            for kind, chunk, _ in run.passes:
                if kind == "forward":
                    held[chunk] += 1
                    moments.append(tuple(held))
                else:
                    held[chunk] -= 1
            for kind, chunk, _ in run.passes if time == 0 and run.times > 2 else ():
                held[chunk] += (run.times - 2) * (1 if kind == "forward" else -1)
    found = {moments[0], moments[-1]}
    for before, now, after in zip(moments, moments[1:], moments[2:], strict=False):
        if any(a + c != 2 * b for a, b, c in zip(before, now, after, strict=True)):  # else it lies between them
            found.add(now)
    return tuple(sorted(one for one in found if not any(_exceeds(other, one) for other in found)))


def _exceeds(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return more != less and all(a >= b for a, b in zip(more, less, strict=True))
