"""Interleaved 1F1B: a stage has several chunks of layers, which groups of micro-batches go through in turn.

Megatron-LM's order, for any number of micro-batches: it wants a multiple of the stages, here a group has as many
micro-batches as stages, or some more, so that no stage waits between two chunks. Larger groups go first: a smaller one
before a larger one would leave stages waiting for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

from .passes import Pass, Run, backward, forward, joined


@lru_cache(maxsize=64)  # a pipeline's stages are asked for twice
def runs(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Run, ...]:
    sizes, forwards, backwards = _passes(stages, micro_batches, chunks)
    early = min(2 * (stages - stage - 1) + (chunks - 1) * sizes[0], len(forwards))
    steps: list[tuple[Pass, ...]] = [(one,) for one in forwards[:early]]
    steps += zip(forwards[early:], backwards, strict=False)
    return tuple(joined([*steps, *((one,) for one in backwards[len(forwards) - early :])]))


@lru_cache(maxsize=4)
def _passes(stages: int, micro_batches: int, chunks: int) -> tuple[list[int], list[Pass], list[Pass]]:
    """Sizes of the groups of micro-batches, and every stage's forwards and backwards."""
    count = max(1, micro_batches // stages)
    sizes = [micro_batches // count + (group < micro_batches % count) for group in range(count)]

    def passes(kind: Callable[[int, int], Pass], turns: range) -> list[Pass]:
        return [
            kind(first + k, chunk)
            for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
            for chunk in turns
            for k in range(size)
        ]

    return sizes, passes(forward, range(chunks)), passes(backward, range(chunks)[::-1])
