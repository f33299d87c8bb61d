"""The pipeline's step time against an independent simulator, its bound, and its time line."""

import random
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import StageTimes, step_ms, timeline
from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import ByKind, Pass, PassKind, order


def longest_path_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """Step time by definition: the longest chain of passes, each after its stage's previous one and its input's, and at
    its end the stage's sync."""
    stages, chunks = len(times.sync), len(times.passes.forward) // len(times.sync)
    orders = [order(schedule, s, stages, micro_batches, chunks) for s in range(stages)]
    previous = {(s, work): before for s in range(stages) for before, work in pairwise(orders[s])}

    @cache
    def stop(stage: int, work: Pass) -> float:
        kind, chunk, k = work
        at = chunk * stages + stage
        ready = []
        if (stage, work) in previous:
            ready.append(stop(stage, previous[stage, work]))
        if kind == "forward" and at > 0:
            ready.append(stop((at - 1) % stages, Pass(kind, (at - 1) // stages, k)) + times.send[at - 1])
        if kind == "backward" and at < stages * chunks - 1:
            ready.append(stop((at + 1) % stages, Pass(kind, (at + 1) // stages, k)) + times.send[at])
        if kind == "backward" and at == stages * chunks - 1:
            ready.append(stop(stage, Pass("forward", chunk, k)))
        return max(ready, default=0.0) + times.passes.of(kind)[at]

    return max(stop(stage, orders[stage][-1]) + times.sync[stage] for stage in range(stages))


def random_times(rng: random.Random) -> StageTimes:
    stages = rng.randint(1, 8)
    spread = rng.choice([0.0, 0.2, 1.0, 3.0])

    def vector(scale: float, length: int = stages) -> list[float]:
        return [scale * (1 + spread * rng.random()) for _ in range(length)]

    zero = rng.random() < 0.3
    return StageTimes(
        ByKind(vector(1.0), vector(rng.choice([0.5, 2.0, 3.0]))),
        vector(rng.choice([0.0, 0.5, 4.0])),
        vector(0.0 if zero else rng.choice([0.01, 0.3, 2.0]), stages - 1),
    )


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", Schedule)
def test_step_time_is_the_longest_chain_of_passes(schedule, count):
    rng = random.Random(20)
    for _ in range(count):
        times, micro_batches = random_times(rng), rng.randint(1, 40)
        truth = longest_path_ms(schedule, times, micro_batches)
        assert step_ms(schedule, times, micro_batches) == pytest.approx(truth, rel=1e-9), (times, micro_batches)
        assert max(span.stop_ms for span in timeline(schedule, times, micro_batches)) == pytest.approx(truth, rel=1e-12)


def test_skipping_steady_rounds_changes_nothing():
    rng = random.Random(21)
    for _ in range(40):
        times, micro_batches = random_times(rng), rng.randint(100, 400)
        spans = timeline(Schedule.ONE_F_ONE_B, times, micro_batches)
        assert step_ms(Schedule.ONE_F_ONE_B, times, micro_batches) == pytest.approx(
            max(span.stop_ms for span in spans), rel=1e-9
        )


def test_gpipe_is_its_closed_form():
    """The longest path of m equal jobs through some stages takes each stage once and the slowest m - 1 times more."""
    rng = random.Random(22)
    for micro_batches in (*range(1, 20), 1000, 10**5):
        times = random_times(rng)
        (forward, backward), stages, more = times.passes, len(times.sync), micro_batches - 1
        down = sum(forward) + sum(times.send) + more * max(forward)
        up = max(
            sum(backward[s:]) + sum(times.send[s:]) + more * max(backward[s:]) + times.sync[s] for s in range(stages)
        )
        assert step_ms(Schedule.GPIPE, times, micro_batches) == pytest.approx(down + up, rel=1e-10)


def test_a_step_of_too_many_passes_is_an_error_of_the_users():
    with pytest.raises(UserError, match="chunks: 1000000 micro-batches in 8 stages"):
        step_ms(Schedule.GPIPE, StageTimes(ByKind([1.0] * 8, [1.0] * 8), [0.0] * 8, [0.0] * 7), 10**6)


def random_chunk_times(rng: random.Random, stages: int, chunks: int) -> StageTimes:
    count, spread = stages * chunks, rng.choice([0.0, 0.2, 1.0, 3.0])

    def vector(scale: float, length: int) -> list[float]:
        return [scale * (1 + spread * rng.random()) for _ in range(length)]

    send = rng.choice([0.0, 0.01, 0.3, 2.0])
    return StageTimes(
        ByKind(vector(1.0, count), vector(2.0, count)), vector(rng.random(), stages), vector(send, count - 1)
    )


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_interleaved_step_time_is_the_longest_chain_of_passes(count):
    """Every chunk of its own time; micro-batches that fill the rounds, and others."""
    rng = random.Random(23)
    for _ in range(count):
        stages, chunks, micro_batches = rng.randint(2, 6), rng.randint(2, 4), rng.randint(1, 16)
        times = random_chunk_times(rng, stages, chunks)
        truth = longest_path_ms(Schedule.ONE_F_ONE_B, times, micro_batches)
        assert step_ms(Schedule.ONE_F_ONE_B, times, micro_batches) == pytest.approx(truth, rel=1e-9)
        last = max(span.stop_ms for span in timeline(Schedule.ONE_F_ONE_B, times, micro_batches))
        assert last == pytest.approx(truth, rel=1e-12)


def test_interleaving_divides_the_bubble_by_the_chunks():
    """The textbook: (P - 1) / (m v) of the work, also where micro-batches don't fill the rounds."""
    for stages in range(2, 9):
        for chunks in range(1, 5):
            count = stages * chunks
            equal = StageTimes(
                ByKind([1.0 / chunks] * count, [2.0 / chunks] * count), [0.0] * stages, [0.0] * (count - 1)
            )
            for micro_batches in (stages, stages + 1, 2 * stages - 1, 2 * stages, 3 * stages + 1, 40):
                bubble = step_ms(Schedule.ONE_F_ONE_B, equal, micro_batches) / (3.0 * micro_batches) - 1
                assert bubble == pytest.approx((stages - 1) / (micro_batches * chunks)), (stages, chunks, micro_batches)


positive = st.floats(0.01, 10)


@st.composite
def stage_times(draw: st.DrawFn) -> StageTimes:
    stages = draw(st.integers(1, 5))
    vector = st.lists(positive, min_size=stages, max_size=stages)
    send = st.lists(st.floats(0, 5), min_size=stages - 1, max_size=stages - 1)
    return StageTimes(ByKind(draw(vector), draw(vector)), draw(vector), draw(send))


@given(stage_times(), st.integers(1, 12), st.sampled_from(Schedule), st.data())
def test_step_time_never_falls_when_anything_takes_longer(times, micro_batches, schedule, data):
    name = data.draw(st.sampled_from(["forward", "backward", "sync", "send"]))
    columns = {"sync": list(times.sync), "send": list(times.send)}
    columns |= {kind: list(times.passes.of(kind)) for kind in PassKind}
    before = step_ms(schedule, times, micro_batches)
    if columns[name]:
        columns[name][data.draw(st.integers(0, len(columns[name]) - 1))] += data.draw(positive)
    passes = ByKind(*(columns.pop(kind) for kind in PassKind))
    assert step_ms(schedule, StageTimes(passes, **columns), micro_batches) >= before * (1 - 1e-12)
    assert step_ms(schedule, times, micro_batches + 1) >= before * (1 - 1e-12)


@given(st.integers(1, 8), st.integers(1, 30), positive, positive, st.sampled_from(Schedule))
def test_equal_stages_meet_the_textbook(stages, micro_batches, forward, backward, schedule):
    times = StageTimes(ByKind([forward] * stages, [backward] * stages), [0.0] * stages, [0.0] * (stages - 1))
    textbook = (micro_batches + stages - 1) * (forward + backward)
    assert step_ms(schedule, times, micro_batches) == pytest.approx(textbook)
