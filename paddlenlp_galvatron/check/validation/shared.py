"""A step where ranks share processors, as on a CPU host with fewer of them: who waits gives its share to the others.

Profiles are measured while all ranks compute at once. A rank with a device of its own always takes that long; where
processors are shared, a pass is the quicker the fewer stages compute beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from ...cost_model.simulate import StageTimes
from ...plan import Plan
from ...plan.schedules import Done, input_of, order, way_ms


class _Job(NamedTuple):
    """A pass of a stage, or its sync."""

    makes: Done | None
    takes: Done | None
    on_its_way_ms: float  # its input, from the neighbour that made it
    long_ms: float  # while all ranks compute


def shared_step(plan: Plan, times: StageTimes, processors: int) -> tuple[float, tuple[float, ...]]:
    """(ms of a step, speed of each stage), where all ranks share so many processors. `times`: while all ranks compute.
    While k of n stages do, each is n / k times as fast, but no faster than with a processor for each of its ranks."""
    queues = [deque(_jobs(plan, times, stage)) for stage in range(plan.pipeline)]
    work_ms = [sum(job.long_ms for job in queue) for queue in queues]
    stops: dict[Done, float] = {}
    left_ms: dict[int, float] = {}  # of what each stage is at
    busy_ms, now = [0.0] * plan.pipeline, 0.0

    def comes(job: _Job) -> float:
        return stops.get(job.takes, inf) + job.on_its_way_ms if job.takes else 0.0

    while any(queues):
        coming = {stage: comes(queue[0]) for stage, queue in enumerate(queues) if queue and stage not in left_ms}
        left_ms |= {stage: queues[stage][0].long_ms for stage, at in coming.items() if at <= now}
        speed = max(1.0, min(plan.pipeline / max(len(left_ms), 1), plan.world_size / processors))
        least_ms = min(left_ms.values(), default=inf)
        ends = now + least_ms / speed
        event = min([ends, *(at for at in coming.values() if at > now)])
        done = [stage for stage, ms in left_ms.items() if event == ends and ms == least_ms]
        for stage in left_ms:
            busy_ms[stage] += event - now
            left_ms[stage] -= (event - now) * speed
        for stage in done:
            del left_ms[stage]
            if makes := queues[stage].popleft().makes:
                stops[makes] = event
        now = event
    return now, tuple(work / busy for work, busy in zip(work_ms, busy_ms, strict=True))


def _jobs(plan: Plan, times: StageTimes, stage: int) -> Iterator[_Job]:
    for work in order(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks):
        at = work.chunk * plan.pipeline + stage  # among all chunks of all stages
        before = input_of(at, work, len(times.forward) - 1)
        long_ms = (times.forward if work.kind == "forward" else times.backward)[at]
        yield _Job((at, work.kind, work.micro_batch), before, way_ms(at, before, times.send), long_ms)
    yield _Job(None, None, 0.0, times.sync[stage])
