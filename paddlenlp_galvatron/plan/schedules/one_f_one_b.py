"""1F1B (PipeDream-Flush): as many forwards as stages follow, then a forward and a backward in turn."""

from __future__ import annotations

from collections.abc import Iterator

from .passes import Run, backward, forward, listed


def runs(stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
    early = min(stages - stage - 1, micro_batches)
    yield Run(listed(forward(0)), early)
    yield Run(listed(forward(early), backward(0)), micro_batches - early)
    yield Run(listed(backward(micro_batches - early)), early)
