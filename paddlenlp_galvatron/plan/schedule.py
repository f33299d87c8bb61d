"""The orders in which stages run their forwards and backwards: each stage's list of passes.

The runtime follows a schedule's lists of passes, the simulation prices them and the search bounds them; no other code
depends on a particular schedule. A schedule is a function that yields a stage's runs, and a line of `Schedule`.

A stage runs each micro-batch once forward and once backward through each of its chunks. A chunk's forwards, and its
backwards, are in the order of the micro-batches, so messages between two stages are needed in the order in which they
are sent. Stages never wait for each other in a circle. Tests check this, and the core refuses other lists.

Chunk c of stage s comes between chunk c of stage s - 1 and of stage s + 1; after the last stage comes chunk c + 1 of
the first. Where stages have one chunk it is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
T = TypeVar("T")


class PassKind(StrEnum):
    """The computation of a pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


KINDS = tuple(PassKind)
FORWARD, BACKWARD = range(len(KINDS))  # the core's numbers


class ByKind(NamedTuple, Generic[T]):
    """A value of each kind of pass, in the order of `PassKind`."""

    forward: T
    backward: T

    def of(self, kind: PassKind) -> T:
        return self[KINDS.index(kind)]


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage's layers."""

    kind: PassKind
    chunk: int
    micro_batch: int


class PassRun(NamedTuple):
    """Passes repeated `times` times; each time the micro-batches advance by `step`."""

    passes: Integers  # [passes, 3], as the core takes them: kind (FORWARD or BACKWARD), chunk, micro-batch
    times: int = 1
    step: int = 1


Done = tuple[int, PassKind, int]  # a pass: chunk index over all stages, kind, micro-batch

Runs = Callable[[int, int, int], Iterable[PassRun]]
"""A schedule: the runs of a stage, in order, given stage, number of stages and of micro-batches."""

ChunkedRuns = Callable[[int, int, int, int], Iterable[PassRun]]
"""The same for several chunks a stage, whose number is the last argument."""


def forward(micro_batch: int) -> tuple[int, int, int]:
    return FORWARD, 0, micro_batch


def backward(micro_batch: int) -> tuple[int, int, int]:
    return BACKWARD, 0, micro_batch


def listed(*passes: tuple[int, int, int]) -> Integers:
    return np.array(passes, dtype=np.int64)


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[PassRun]:
    """All forwards, then all backwards."""
    yield PassRun(listed(forward(0)), micro_batches)
    yield PassRun(listed(backward(0)), micro_batches)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[PassRun]:
    """1F1B (PipeDream-Flush): as many forwards as later stages, then alternately a forward and a backward."""
    early = min(stages - stage - 1, micro_batches)
    yield PassRun(listed(forward(0)), early)
    yield PassRun(listed(forward(early), backward(0)), micro_batches - early)
    yield PassRun(listed(backward(micro_batches - early)), early)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[PassRun]:
    """Interleaved 1F1B: groups of micro-batches pass through a stage's chunks of layers in turn.

    Megatron-LM's order, generalized from multiples of the stages to any number of micro-batches. A group has at least
    as many micro-batches as stages, so that no stage waits between two chunks. Larger groups come first, as a smaller
    group before a larger would deadlock.
    """
    forwards, backwards, size, larger = _passes(stages, micro_batches, chunks)
    early = min(2 * (stages - stage - 1) + (chunks - 1) * (size + bool(larger)), len(forwards))
    later = forwards[early:]
    # Alternately a forward and a backward. They repeat between groups of equal size: first the larger groups, then the
    # others.
    turns = [(0, max(larger - early, 0), size + 1), (min(larger, len(later)), len(later), size)]
    yield from _listed(forwards[:early])
    at = 0
    for start, stop, each in turns:
        yield from _listed(_in_turn(later, backwards, at, start))
        period = chunks * each
        times = (stop - start) // period
        if times:
            yield PassRun(_in_turn(later, backwards, start, start + period), times, each)
        at = start + times * period
    yield from _listed(np.concatenate([_in_turn(later, backwards, at, len(later)), backwards[len(later) :]]))


def _in_turn(forwards: Integers, backwards: Integers, start: int, stop: int) -> Integers:
    """Passes of a range of the lists."""
    pairs: Integers = np.stack([forwards[start:stop], backwards[start:stop]], axis=1)
    return pairs.reshape(-1, 3)


def _listed(passes: Integers) -> Iterator[PassRun]:
    """Passes in the listed order."""
    if len(passes):
        yield PassRun(passes)


@lru_cache(maxsize=4)
def _passes(stages: int, micro_batches: int, chunks: int) -> tuple[Integers, Integers, int, int]:
    """Forwards, backwards, the size of a small group of micro-batches, and the number of passes in the larger groups,
    which have one micro-batch more."""
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    split = more * (size + 1)  # the first micro-batch of the other groups
    groups = np.arange(split).reshape(more, size + 1), np.arange(split, micro_batches).reshape(count - more, size)

    def passes(kind: int, turns: range) -> Integers:
        every = []
        for group in groups:
            rows = np.empty((len(group), chunks, group.shape[1], 3), dtype=np.int64)
            rows[..., 0], rows[..., 1], rows[..., 2] = kind, np.array(turns)[:, None], group[:, None]
            every.append(rows.reshape(-1, 3))
        return np.concatenate(every)

    return passes(FORWARD, range(chunks)), passes(BACKWARD, range(chunks)[::-1]), size, chunks * split


class Schedule(StrEnum):
    """A schedule, by its name in files and options (Galvatron's)."""

    label: str  # text for people
    of_one_chunk: Runs
    of_chunks: ChunkedRuns | None  # order for several chunks a stage; None: none

    def __new__(cls, name: str, label: str, runs: Runs, of_chunks: ChunkedRuns | None = None) -> Schedule:
        member = str.__new__(cls, name)
        member._value_, member.label, member.of_one_chunk, member.of_chunks = name, label, runs, of_chunks
        return member

    ONE_F_ONE_B = "pipedream_flush", "1F1B", one_f_one_b, interleaved
    GPIPE = "gpipe", "GPipe", gpipe

    def runs(self, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> Iterable[PassRun]:
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
    """[moments, chunks]: micro-batches in flight of each chunk, at every possible peak of a stage's activations; with
    one chunk a single number."""
    return _peaks(schedule, stages, micro_batches, chunks)[stage]


@lru_cache(maxsize=1024)
def _peaks(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Micro-batches in flight at the peaks of all stages; computing all takes little longer than one."""
    return held_at_peaks(*arrays(schedule, stages, micro_batches, chunks), chunks)


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


def expand(runs: Iterable[PassRun]) -> Iterator[Pass]:
    """Every pass, in order."""
    for run in runs:
        passes = run.passes.tolist()
        for time in range(run.times):
            for kind, chunk, micro_batch in passes:
                yield Pass(KINDS[kind], chunk, micro_batch + time * run.step)


def input_of(at: int, work: Pass, last: int) -> Done | None:
    """The pass whose output is the input of a pass of chunk `at`; None: the very first. `last`: the last chunk."""
    if work.kind is PassKind.FORWARD:
        return (at - 1, work.kind, work.micro_batch) if at else None
    return (at, PassKind.FORWARD, work.micro_batch) if at == last else (at + 1, work.kind, work.micro_batch)


def way_ms(at: int, source: Done | None, send: Sequence[float]) -> float:
    """Delay of a pass of chunk `at` after its `source`; `send`: times from each chunk to the next."""
    return send[min(at, source[0])] if source and source[0] != at else 0.0


def arrivals(order_of: Callable[[int], Iterable[Pass]], stage: int, stages: int, chunks: int) -> list[int]:
    """For each pass of a stage, count the stage's messages that its input proves to have arrived: two stages exchange
    activations and gradients, and the sender of one has already received some of the others. `order_of`: the passes of
    a stage."""
    last = stages * chunks - 1
    received_by: dict[Done, int] = {}
    for neighbour in {(stage - 1) % stages, (stage + 1) % stages} - {stage}:
        received = dict.fromkeys(KINDS, 0)
        for work in order_of(neighbour):
            at = work.chunk * stages + neighbour
            source = input_of(at, work, last)
            if source and source[0] % stages == stage:
                received[work.kind] += 1
            received_by[at, work.kind, work.micro_batch] = received[KINDS[work.kind is PassKind.FORWARD]]
    sources = (input_of(work.chunk * stages + stage, work, last) for work in order_of(stage))
    return [received_by.get(source, 0) if source else 0 for source in sources]


def without_repeats(runs: Iterable[PassRun], chunks: int) -> Iterator[Pass]:
    """Every pass in order, with balanced runs (as many forwards as backwards of every chunk) repeated at most four
    times: numbers in flight are then the same at the first and last repetition, between them, and after.
    """
    for run in runs:
        each = Counter((kind, chunk) for kind, chunk, _ in run.passes.tolist())
        even = len(each) == 2 * chunks and len(set(each.values())) == 1
        yield from expand([run._replace(times=min(run.times, 4)) if even else run])


def held_at_peaks(passes: Integers, runs: Integers, chunks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Micro-batches in flight of each chunk at every moment that may be the peak for some sizes of activations: for
    each stage, from the lists of all."""
    stage, count, times, _ = runs.T
    stops = np.cumsum(count)
    steps = np.zeros((len(passes), 2 + chunks), dtype=np.int64)  # stage, is forward, change of each chunk's number
    steps[:, 0], steps[:, 1] = np.repeat(stage, count), passes[:, 0] == FORWARD
    steps[np.arange(len(passes)), 2 + passes[:, 1]] = 2 * steps[:, 1] - 1
    between = np.add.reduceat(steps, stops - count) * (times - 2)[:, None]
    between[:, 0], between[:, 1] = stage, 0
    walk = []
    for run, (start, stop) in enumerate(pairwise([0, *stops.tolist()])):
        walk.append(steps[start:stop])
        if times[run] > 1:  # the first and the last repetition bound the number between them
            walk += [between[run : run + 1], steps[start:stop]]
    walked = np.concatenate(walk)
    moments = walked[:, 1] == 1  # moments after a forward
    stage, held = walked[moments, 0], np.cumsum(walked[:, 2:], axis=0)[moments]
    end, way = stage[1:] != stage[:-1], held[1:] - held[:-1]
    peaks = np.ones(len(held), dtype=bool)
    peaks[1:-1] = (way[1:] != way[:-1]).any(axis=1) | end[1:] | end[:-1]  # any other moment lies between its neighbours
    stage, held = stage[peaks], held[peaks]
    return [_largest(stage_held) for stage_held in np.split(held, np.flatnonzero(np.diff(stage)) + 1)]


def _largest(held: Integers) -> tuple[tuple[int, ...], ...]:
    """The distinct rows that no other row dominates."""
    if held.shape[1] == 1:
        return ((int(held.max()),),)
    covers = (held[:, None] >= held).all(axis=-1)
    exceeded = (covers & ~covers.T).any(axis=0)
    return tuple(sorted(set(map(tuple, held[~exceeded].tolist()))))
