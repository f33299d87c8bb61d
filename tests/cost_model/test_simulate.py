"""The pipeline's step time against an independent simulator, its bound, and its time line."""

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interleaved import CHUNKS, INTERLEAVED

from paddlenlp_galvatron.cost_model import StageTimes, lower_bound_ms, step_ms, timeline
from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedules import order


def longest_path_ms(schedule: Schedule, times: StageTimes, micro_batches: int) -> float:
    """Step time by definition: the longest chain of passes, each after its stage's previous one and its input's, and at
    its end the stage's sync."""
    stages = len(times.forward)
    orders = [[(kind, k) for kind, _, k in order(schedule, s, stages, micro_batches)] for s in range(stages)]

    @cache
    def stop(stage: int, work: tuple[str, int]) -> float:
        kind, k = work
        ready = []
        position = orders[stage].index(work)
        if position:
            ready.append(stop(stage, orders[stage][position - 1]))
        if kind == "forward" and stage > 0:
            ready.append(stop(stage - 1, work) + times.send[stage - 1])
        if kind == "backward" and stage < stages - 1:
            ready.append(stop(stage + 1, work) + times.send[stage])
        if kind == "backward" and stage == stages - 1:
            ready.append(stop(stage, ("forward", k)))
        return max(ready, default=0.0) + (times.forward if kind == "forward" else times.backward)[stage]

    return max(stop(stage, orders[stage][-1]) + times.sync[stage] for stage in range(stages))


def random_times(rng: random.Random) -> StageTimes:
    stages = rng.randint(1, 8)
    spread = rng.choice([0.0, 0.2, 1.0, 3.0])

    def vector(scale: float, length: int = stages) -> list[float]:
        return [scale * (1 + spread * rng.random()) for _ in range(length)]

    zero = rng.random() < 0.3
    return StageTimes(
        vector(1.0),
        vector(rng.choice([0.5, 2.0, 3.0])),
        vector(rng.choice([0.0, 0.5, 4.0])),
        vector(0.0 if zero else rng.choice([0.01, 0.3, 2.0]), stages - 1),
    )


@pytest.mark.parametrize("schedule", Schedule)
def test_step_time_is_the_longest_chain_of_passes(schedule):
    rng = random.Random(20)
    for _ in range(1000):
        times, micro_batches = random_times(rng), rng.randint(1, 40)
        truth = longest_path_ms(schedule, times, micro_batches)
        assert step_ms(schedule, times, micro_batches) == pytest.approx(truth, rel=1e-9), (times, micro_batches)
        assert lower_bound_ms(schedule, times, micro_batches) <= truth * (1 + 1e-12), (times, micro_batches)
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
    for micro_batches in (*range(1, 20), 1000, 10**6):
        times = random_times(rng)
        stages, more = len(times.forward), micro_batches - 1
        down = sum(times.forward) + sum(times.send) + more * max(times.forward)
        up = max(
            sum(times.backward[s:]) + sum(times.send[s:]) + more * max(times.backward[s:]) + times.sync[s]
            for s in range(stages)
        )
        assert step_ms(Schedule.GPIPE, times, micro_batches) == pytest.approx(down + up, rel=1e-11)


def test_chunks_of_a_stage_take_turns():
    """The textbook of interleaving: the bubble shrinks by the number of chunks. And core and time line agree."""
    rng = random.Random(23)
    for _ in range(200):
        times = random_times(rng)
        stages = len(times.forward)
        times = StageTimes(times.forward, times.backward, times.sync, [*times.send, rng.random()])
        micro_batches = stages * rng.randint(1, 5)
        spans = timeline(INTERLEAVED, times, micro_batches)
        expected = pytest.approx(max(span.stop_ms for span in spans), rel=1e-12)
        assert step_ms(INTERLEAVED, times, micro_batches) == expected, (times, micro_batches)
        even = StageTimes([1.0] * stages, [2.0] * stages, [0.0] * stages, [0.0] * stages)
        textbook = 3 * (micro_batches + (stages - 1) / CHUNKS)
        assert step_ms(INTERLEAVED, even, micro_batches) == pytest.approx(textbook)


positive = st.floats(0.01, 10)


@st.composite
def stage_times(draw: st.DrawFn) -> StageTimes:
    stages = draw(st.integers(1, 5))
    vector = st.lists(positive, min_size=stages, max_size=stages)
    send = st.lists(st.floats(0, 5), min_size=stages - 1, max_size=stages - 1)
    return StageTimes(draw(vector), draw(vector), draw(vector), draw(send))


@given(stage_times(), st.integers(1, 12), st.sampled_from(Schedule), st.data())
def test_step_time_never_falls_when_anything_takes_longer(times, micro_batches, schedule, data):
    name = data.draw(st.sampled_from(["forward", "backward", "sync", "send"]))
    columns = {n: list(getattr(times, n)) for n in ("forward", "backward", "sync", "send")}
    before = step_ms(schedule, times, micro_batches)
    if columns[name]:
        columns[name][data.draw(st.integers(0, len(columns[name]) - 1))] += data.draw(positive)
    assert step_ms(schedule, StageTimes(**columns), micro_batches) >= before * (1 - 1e-12)
    assert step_ms(schedule, times, micro_batches + 1) >= before * (1 - 1e-12)


@given(st.integers(1, 8), st.integers(1, 30), positive, positive, st.sampled_from(Schedule))
def test_equal_stages_meet_the_textbook_and_the_bound(stages, micro_batches, forward, backward, schedule):
    times = StageTimes([forward] * stages, [backward] * stages, [0.0] * stages, [0.0] * (stages - 1))
    textbook = (micro_batches + stages - 1) * (forward + backward)
    assert step_ms(schedule, times, micro_batches) == pytest.approx(textbook)
    assert lower_bound_ms(schedule, times, micro_batches) == pytest.approx(textbook)
