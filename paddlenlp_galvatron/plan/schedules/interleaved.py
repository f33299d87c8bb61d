"""Interleaved 1F1B: a stage has several chunks of layers, which groups of micro-batches go through in turn.

Megatron-LM's order, for any number of micro-batches: it wants a multiple of the stages, here a group has as many
micro-batches as stages, or some more, so that no stage waits between two chunks. Larger groups go first: a smaller one
before a larger one would leave stages waiting for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from .passes import Pass, Run


def runs(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Run]:
    sizes, forwards, backwards = _passes(stages, micro_batches, chunks)
    early = min(2 * (stages - stage - 1) + (chunks - 1) * sizes[0], len(forwards))
    later = forwards[early:]
    # A forward and a backward in turn. They repeat from one group of micro-batches to the next where both are of groups
    # of one size: first those of larger groups, then of the others.
    larger = 0 if sizes[0] == sizes[-1] else chunks * sizes[0] * sizes.count(sizes[0])
    turns = [(0, max(larger - early, 0), sizes[0]), (min(larger, len(later)), len(later), sizes[-1])]
    yield from _listed(forwards[:early])
    at = 0
    for start, stop, size in turns:
        yield from _listed(_in_turn(later, backwards, at, start))
        period = chunks * size
        times = (stop - start) // period
        if times:
            yield Run(_in_turn(later, backwards, start, start + period), times, size)
        at = start + times * period
    yield from _listed((*_in_turn(later, backwards, at, len(later)), *backwards[len(later) :]))


def _in_turn(forwards: list[Pass], backwards: list[Pass], start: int, stop: int) -> tuple[Pass, ...]:
    """From one place of the lists to another."""
    return tuple(one for pair in zip(forwards[start:stop], backwards[start:stop], strict=True) for one in pair)


def _listed(passes: Sequence[Pass]) -> Iterator[Run]:
    """As they are."""
    if passes:
        yield Run(tuple(passes))


@lru_cache(maxsize=4)
def _passes(stages: int, micro_batches: int, chunks: int) -> tuple[list[int], list[Pass], list[Pass]]:
    """Sizes of the groups of micro-batches, and every stage's forwards and backwards."""
    count = max(1, micro_batches // stages)
    sizes = [micro_batches // count + (group < micro_batches % count) for group in range(count)]

    def passes(kind: Literal["forward", "backward"], turns: range) -> list[Pass]:
        return [
            Pass(kind, chunk, micro_batch)
            for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
            for chunk in turns
            for micro_batch in range(first, first + size)
        ]

    return sizes, passes("forward", range(chunks)), passes("backward", range(chunks)[::-1])
