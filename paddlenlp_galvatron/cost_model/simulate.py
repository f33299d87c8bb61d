"""Time of one step of a pipeline: the event simulation of `plan.schedule.order`, in O(stages * micro-batches) or less.

A pass starts when its stage has finished the pass before it and its input has arrived; a message to a neighbour delays
its arrival and keeps neither stage busy. After its last backward each stage is busy for `sync` more, for which no other
stage waits; the step ends with the last of them. All results are sums and maxima of the inputs, so the step time is
monotone in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..plan.schedule import Pass, order
from ..plan.strategy import Schedule


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the simulation needs to know of each stage, in ms."""

    forward: Sequence[float]  # one micro-batch
    backward: Sequence[float]  # one micro-batch
    sync: Sequence[float]  # after the last backward
    send: Sequence[float]  # from stage s to s + 1, and the same back; one entry fewer


class Span(NamedTuple):
    """One pass on the time line, in ms since the step began."""

    stage: int
    work: Pass | None  # None: the stage's sync
    start_ms: float
    stop_ms: float


def step_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """Time of one step in ms."""
    if len(times.forward) == 1:
        return micro_batches * (times.forward[0] + times.backward[0]) + times.sync[0]
    simulate = _gpipe if schedule is Schedule.GPIPE else _one_f_one_b
    return simulate(times, micro_batches)


def _gpipe(times: StageTimes, micro_batches: int) -> float:
    """Closed form: equal jobs through stages in a row are limited by one stage. Exact.

    The longest path of m equal jobs through some stages takes each stage once and the slowest m - 1 times more.
    """
    forward = sum(times.forward) + sum(times.send) + (micro_batches - 1) * max(times.forward)
    latest = path = slowest = 0.0  # latest end; sum of the backwards passed; slowest of them
    for stage in reversed(range(len(times.forward))):
        path += times.backward[stage] + (times.send[stage] if stage < len(times.send) else 0.0)
        slowest = max(slowest, times.backward[stage])
        latest = max(latest, path + (micro_batches - 1) * slowest + times.sync[stage])
    return forward + latest


def _one_f_one_b(times: StageTimes, micro_batches: int) -> float:
    """Round k holds forward k and backward k - (stages - stage - 1) of every stage.

    Once a full round moves every stage by the same time, all further full rounds do, and are skipped.
    """
    forward, backward = times.forward, times.backward
    send = [*times.send, 0.0]
    stages = len(forward)
    free = [0.0] * stages  # when each stage has finished its latest pass
    done = [0.0] * (stages + 1)  # when each stage has finished its latest backward
    k = 0
    while k < micro_batches + stages - 1:
        before = free.copy()
        arrival = 0.0
        for stage in range(stages):
            now = free[stage]
            if k < micro_batches:
                now = max(now, arrival) + forward[stage]
                arrival = now + send[stage]
            index = k - (stages - stage - 1)
            if 0 <= index < micro_batches:
                now = max(now, done[stage + 1] + send[stage]) + backward[stage]
                done[stage] = now
            free[stage] = now
        if stages <= k < micro_batches - 2:
            shift = free[0] - before[0]
            if all(abs(now - then - shift) <= 1e-13 * now for now, then in zip(free, before, strict=True)):
                rounds = micro_batches - 2 - k
                free = [now + rounds * shift for now in free]
                done = [*free, 0.0]
                k += rounds
        k += 1
    return max(end + sync for end, sync in zip(free, times.sync, strict=True))


def lower_bound_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """A bound below `step_ms`, O(stages); equal to it when one stage is never idle between its first and last pass.

    For each stage: its input needs the forwards before it, the last gradients of the stages before it come after its
    own, and in between it either works all the time; or waits for its first gradient, which goes down the pipeline and
    back; or waits so for its last one. `early` forwards come before the first backward, as many backwards after the
    last forward.
    """
    m, stages = micro_batches, len(times.forward)
    send = [*times.send, 0.0]
    columns = list(zip(times.forward, times.backward, times.sync, send, strict=True))
    below = [*accumulate((f + b + 2 * p for f, b, _, p in reversed(columns)), initial=0.0)][::-1]
    best = head = end = 0.0  # end: from the stage's last backward to the end of the step
    for stage, (f, b, y, p) in enumerate(columns):
        end = max(y, end)
        early = m if schedule is Schedule.GPIPE else min(stages - stage, m)
        round_trip = below[stage + 1] + 2 * p
        inside = max(
            m * (f + b),
            f + round_trip + m * b + (m - early) * f,
            m * f + (m - early) * b + round_trip + b,
        )
        best = max(best, head + inside + end)
        head += f + p
        end += p + b
    return best


def timeline(schedule: Schedule, times: StageTimes, micro_batches: int) -> list[Span]:
    """Every pass of every stage with its start and stop; `step_ms` is the latest stop."""
    stages = len(times.forward)
    queues = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    place, free = [0] * stages, [0.0] * stages
    stop: dict[tuple[int, Pass], float] = {}
    spans: list[Span] = []
    waiting = True
    while waiting:
        waiting = False
        for stage, queue in enumerate(queues):
            while place[stage] < len(queue):
                work = queue[place[stage]]
                ready = _arrival(stage, stages, work, stop, times.send)
                if ready is None:
                    waiting = True
                    break
                start = max(free[stage], ready)
                long = times.forward[stage] if work.kind == "forward" else times.backward[stage]
                free[stage] = stop[stage, work] = start + long
                spans.append(Span(stage, work, start, start + long))
                place[stage] += 1
    spans += [
        Span(s, None, end, end + sync) for s, (end, sync) in enumerate(zip(free, times.sync, strict=True)) if sync
    ]
    return sorted(spans, key=lambda span: (span.start_ms, span.stage))


def _arrival(
    stage: int, stages: int, work: Pass, stop: dict[tuple[int, Pass], float], send: Sequence[float]
) -> float | None:
    """When the input of a pass is there; None: not yet known."""
    if work.kind == "forward":
        if stage == 0:
            return 0.0
        end = stop.get((stage - 1, work))
        return None if end is None else end + send[stage - 1]
    if stage == stages - 1:
        return stop.get((stage, Pass("forward", work.micro_batch)))
    end = stop.get((stage + 1, work))
    return None if end is None else end + send[stage]
