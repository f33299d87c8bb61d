"""Time of one step of a pipeline: the event simulation of `plan.schedule.order`, in O(stages * micro-batches) or less.

A pass starts when its stage has finished the pass before it and its input has arrived; a message to a neighbour delays
its arrival and keeps neither stage busy. Each stage's last backward takes `sync` longer. All results are sums and
maxima of the inputs, so the step time is monotone in each of them.
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
    sync: Sequence[float]  # on top of the last backward
    send: Sequence[float]  # from stage s to s + 1, and the same back; one entry fewer


class Span(NamedTuple):
    """One pass on the time line, in ms since the step began."""

    stage: int
    work: Pass
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

    The longest path of m equal jobs through stages 0..s takes each stage once and the slowest m - 1 times more. The
    last job's backward is longer by `sync`, so it is laid over the path of the m - 1 jobs before it.
    """
    send = [*times.send, 0.0]
    forward = sum(times.forward) + sum(times.send) + (micro_batches - 1) * max(times.forward)
    end = path = slowest = 0.0  # last job's end; sum of stages passed; slowest of them
    latest = 0.0
    for stage in reversed(range(len(times.forward))):
        backward = times.backward[stage]
        path += send[stage] + backward
        slowest = max(slowest, backward)
        before = path + (micro_batches - 2) * slowest if micro_batches > 1 else 0.0
        end = max(before, end + send[stage]) + backward + times.sync[stage]
        latest = max(latest, end)
    return forward + latest


def _one_f_one_b(times: StageTimes, micro_batches: int) -> float:
    """Round k holds forward k and backward k - (stages - stage - 1) of every stage.

    Once a full round moves every stage by the same time, all further full rounds do, and are skipped.
    """
    forward, backward, sync = times.forward, times.backward, times.sync
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
                if index == micro_batches - 1:
                    now += sync[stage]
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
    return max(free)


def lower_bound_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """A bound below `step_ms`, O(stages); equal to it when one stage is never idle between its first and last pass.

    For each stage: its input needs the forwards before it, its last gradient the backwards before it, and in between
    it either works all the time; or waits for its first gradient, which goes down the pipeline and back; or waits
    so for its last one. `early` forwards come before the first backward, as many backwards after the last forward.
    """
    m, stages = micro_batches, len(times.forward)
    send = [*times.send, 0.0]
    columns = list(zip(times.forward, times.backward, times.sync, send, strict=True))
    head = [0.0, *accumulate(f + p for f, _, _, p in columns)]
    tail = [0.0, *accumulate(b + y + p for _, b, y, p in columns)]
    below = [*accumulate((f + b for f, b, _, _ in reversed(columns)), initial=0.0)][::-1]
    below_sync = [*accumulate((y for _, _, y, _ in reversed(columns)), initial=0.0)][::-1]
    links = [*accumulate((p for *_, p in reversed(columns)), initial=0.0)][::-1]
    best = 0.0
    for stage, (f, b, y, _) in enumerate(columns):
        early = m if schedule is Schedule.GPIPE else min(stages - stage, m)
        round_trip = below[stage + 1] + 2 * links[stage]
        inside = max(
            m * (f + b),
            f + round_trip + m * b + (m - early) * f,
            m * f + (m - early) * b + round_trip + below_sync[stage + 1] + b,
        )
        best = max(best, head[stage] + inside + y + tail[stage])
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
                if work == Pass("backward", micro_batches - 1):
                    long += times.sync[stage]
                free[stage] = stop[stage, work] = start + long
                spans.append(Span(stage, work, start, start + long))
                place[stage] += 1
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
