"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from .passes import Run, backward, forward, listed


def runs(stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
    yield Run(listed(forward(0)), micro_batches)
    yield Run(listed(backward(0)), micro_batches)
