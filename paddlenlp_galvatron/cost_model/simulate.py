"""Time of one step of a pipeline: the event simulation of a schedule's lists of passes (`plan.schedule`).

A pass starts when its stage has finished the pass before it and its input has arrived; a message to a neighbour delays
its arrival and keeps neither stage busy. After its last backward each stage is busy for `sync` more, for which no other
stage waits; the step ends when the last stage is done. All results are sums and maxima of the inputs, so the step time
is monotone in each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import galvatron_dp_core
import numpy as np

from ..base.errors import UserError
from ..plan.schedule import ByKind, Done, Pass, Schedule, arrays, input_of, order, way_ms


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of a pipeline for the simulation, in ms.

    If stages have several chunks, each list but `sync` has the first chunk of every stage, then the second of every
    stage, and so on.
    """

    passes: ByKind[Sequence[float]]  # time of each chunk, one micro-batch
    sync: Sequence[float]  # time of each stage after its last backward
    send: Sequence[float]  # from each chunk to the next, and as much back; one entry fewer

    @property
    def stages(self) -> int:
        return len(self.sync)

    @property
    def chunks(self) -> int:
        """Number of chunks of a stage."""
        return len(self.passes.forward) // len(self.sync)


class Span(NamedTuple):
    """One pass on the time line, in ms since the step began."""

    stage: int
    work: Pass | None  # None: the stage's sync
    start_ms: float
    stop_ms: float


def step_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """Time of one step in ms, by the core's simulation, as in the search. Raises UserError if a step has too many
    passes."""
    passes, runs = arrays(schedule, times.stages, micro_batches, times.chunks)
    each = np.array(times.passes, dtype=float), times.sync, np.array(times.send, dtype=float)
    try:
        return float(galvatron_dp_core.step_ms(passes, runs, micro_batches, *each))
    except galvatron_dp_core.TooHard as error:
        raise UserError(
            f"chunks: {micro_batches} micro-batches in {times.stages} stages: {error}; give fewer micro-batches"
        ) from None


def timeline(schedule: Schedule, times: StageTimes, micro_batches: int) -> list[Span]:
    """Every pass of every stage with its start and stop; `step_ms` is the latest stop."""
    stages, chunks = times.stages, times.chunks
    queues = [order(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)]
    turn, free = [0] * stages, [0.0] * stages
    stop: dict[Done, float] = {}
    spans: list[Span] = []
    waiting = True
    while waiting:
        waiting = False
        for stage, queue in enumerate(queues):
            while turn[stage] < len(queue):
                work = queue[turn[stage]]
                at = work.chunk * stages + stage  # index among all chunks of all stages
                source = input_of(at, work, stages * chunks - 1)
                ready = 0.0 if source is None else stop.get(source)
                if ready is None:
                    waiting = True
                    break
                start = max(free[stage], ready + way_ms(at, source, times.send))
                long = times.passes.of(work.kind)[at]
                free[stage] = stop[at, work.kind, work.micro_batch] = start + long
                spans.append(Span(stage, work, start, start + long))
                turn[stage] += 1
    spans += [Span(s, None, at, at + sync) for s, (at, sync) in enumerate(zip(free, times.sync, strict=True)) if sync]
    return sorted(spans, key=lambda span: (span.start_ms, span.stage))
