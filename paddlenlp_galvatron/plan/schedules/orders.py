"""The order of passes of each schedule: a stage's list of runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from .passes import BACKWARD, FORWARD, Integers, Run, backward, forward, listed


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
    """All forwards, then all backwards."""
    yield Run(listed(forward(0)), micro_batches)
    yield Run(listed(backward(0)), micro_batches)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
    """1F1B (PipeDream-Flush): as many forwards as stages follow, then a forward and a backward in turn."""
    early = min(stages - stage - 1, micro_batches)
    yield Run(listed(forward(0)), early)
    yield Run(listed(forward(early), backward(0)), micro_batches - early)
    yield Run(listed(backward(micro_batches - early)), early)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Run]:
    """Interleaved 1F1B: a stage has several chunks of layers, which groups of micro-batches go through in turn.

    Megatron-LM's order, for any number of micro-batches: it wants a multiple of the stages, here a group has as many
    micro-batches as stages, or some more, so that no stage waits between two chunks. Larger groups go first: a smaller
    one before a larger one would leave stages waiting for each other in a circle.
    """
    forwards, backwards, size, larger = _passes(stages, micro_batches, chunks)
    early = min(2 * (stages - stage - 1) + (chunks - 1) * (size + bool(larger)), len(forwards))
    later = forwards[early:]
    # A forward and a backward in turn. They repeat from one group of micro-batches to the next where both are of groups
    # of one size: first those of larger groups, then of the others.
    turns = [(0, max(larger - early, 0), size + 1), (min(larger, len(later)), len(later), size)]
    yield from _listed(forwards[:early])
    at = 0
    for start, stop, each in turns:
        yield from _listed(_in_turn(later, backwards, at, start))
        period = chunks * each
        times = (stop - start) // period
        if times:
            yield Run(_in_turn(later, backwards, start, start + period), times, each)
        at = start + times * period
    yield from _listed(np.concatenate([_in_turn(later, backwards, at, len(later)), backwards[len(later) :]]))


def _in_turn(forwards: Integers, backwards: Integers, start: int, stop: int) -> Integers:
    """From one place of the lists to another."""
    pairs: Integers = np.stack([forwards[start:stop], backwards[start:stop]], axis=1)
    return pairs.reshape(-1, 3)


def _listed(passes: Integers) -> Iterator[Run]:
    """As they are."""
    if len(passes):
        yield Run(passes)


@lru_cache(maxsize=4)
def _passes(stages: int, micro_batches: int, chunks: int) -> tuple[Integers, Integers, int, int]:
    """Every stage's forwards and backwards, micro-batches of a group, and how many of the passes are those of groups of
    one more."""
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    split = more * (size + 1)  # the first micro-batch of the other groups
    groups = np.arange(split).reshape(more, size + 1), np.arange(split, micro_batches).reshape(count - more, size)

    def passes(kind: int, turns: range) -> Integers:
        every = []
        for some in groups:
            rows = np.empty((len(some), chunks, some.shape[1], 3), dtype=np.int64)
            rows[..., 0], rows[..., 1], rows[..., 2] = kind, np.array(turns)[:, None], some[:, None]
            every.append(rows.reshape(-1, 3))
        return np.concatenate(every)

    return passes(FORWARD, range(chunks)), passes(BACKWARD, range(chunks)[::-1]), size, chunks * split
