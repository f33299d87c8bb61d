"""Megatron-LM's interleaved 1F1B, two chunks a stage: a schedule that we don't have, so that its place is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paddlenlp_galvatron.plan.schedules.passes import Pass, Run, backward, forward

CHUNKS = 2


class Interleaved:
    """Groups of as many micro-batches as stages go through the chunks in turn. Needs a multiple of the stages."""

    def runs(self, stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
        def passes(kind: Callable[[int, int], Pass], chunks: range) -> list[Pass]:
            return [
                kind(first + k, chunk)
                for first in range(0, micro_batches, stages)
                for chunk in chunks
                for k in range(stages)
            ]

        forwards, backwards = passes(forward, range(CHUNKS)), passes(backward, range(CHUNKS)[::-1])
        early = min(2 * (stages - stage - 1) + (CHUNKS - 1) * stages, len(forwards))
        if micro_batches == stages:
            early = len(forwards)
        order = forwards[:early]
        for one, other in zip(forwards[early:], backwards, strict=False):
            order += [one, other]
        for one in (*order, *backwards[len(forwards) - early :]):
            yield Run((one,))

    def __str__(self) -> str:
        return "interleaved"


INTERLEAVED = Interleaved()
