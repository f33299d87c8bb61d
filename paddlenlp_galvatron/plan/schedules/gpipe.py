"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from .passes import Run, backward, forward


def runs(stage: int, stages: int, micro_batches: int) -> Iterator[Run]:
    yield Run((forward(0),), micro_batches)
    yield Run((backward(0),), micro_batches)
