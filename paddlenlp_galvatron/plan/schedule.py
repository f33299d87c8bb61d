"""The order in which a stage runs its forwards and backwards. The runtime follows it and the simulator prices it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .strategy import Schedule


class Pass(NamedTuple):
    """One forward or backward pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def order(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Passes of a stage, in order. 1F1B starts with `stages - stage - 1` forwards (PipeDream-Flush)."""
    warm_up = micro_batches if schedule is Schedule.GPIPE else min(stages - stage - 1, micro_batches)
    passes = [Pass("forward", k) for k in range(warm_up)]
    for k in range(warm_up, micro_batches):
        passes += [Pass("forward", k), Pass("backward", k - warm_up)]
    passes += [Pass("backward", k) for k in range(micro_batches - warm_up, micro_batches)]
    return passes


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Largest number of micro-batches whose activations a stage holds at once."""
    return micro_batches if schedule is Schedule.GPIPE else min(stages - stage, micro_batches)
