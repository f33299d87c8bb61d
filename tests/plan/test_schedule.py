"""Every schedule's lists of passes: complete, in order, without a circle; also of one with several chunks a stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interleaved import INTERLEAVED

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedules import Pass, arrays, in_flight, order
from paddlenlp_galvatron.plan.schedules.passes import expand

pipelines = st.integers(1, 6).flatmap(
    lambda stages: st.tuples(st.sampled_from(Schedule), st.integers(0, stages - 1), st.just(stages), st.integers(1, 12))
)
SIZES = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]
ALL = [(schedule, *size) for schedule in Schedule for size in SIZES] + [
    (INTERLEAVED, stages, micro_batches) for stages, micro_batches in SIZES if micro_batches % stages == 0
]


@given(pipelines)
def test_each_micro_batch_goes_forward_once_and_then_backward_once(pipeline):
    passes = order(*pipeline)
    micro_batches = pipeline[-1]
    for kind in ("forward", "backward"):
        assert [p.micro_batch for p in passes if p.kind == kind] == list(range(micro_batches))
    for k in range(micro_batches):
        assert passes.index(Pass("forward", 0, k)) < passes.index(Pass("backward", 0, k))


@given(pipelines)
def test_in_flight_is_what_the_order_holds(pipeline):
    held = most = 0
    for one in order(*pipeline):
        held += 1 if one.kind == "forward" else -1
        most = max(most, held)
    assert in_flight(*pipeline) == most


def test_in_flight_is_the_textbooks():
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            where = stage, stages, micro_batches
            assert in_flight(Schedule.GPIPE, *where) == micro_batches
            assert in_flight(Schedule.ONE_F_ONE_B, *where) == min(stages - stage, micro_batches)


@pytest.mark.parametrize("schedule", [*Schedule, INTERLEAVED], ids=str)
def test_stages_exchange_messages_in_one_order_and_never_wait_in_a_circle(schedule):
    """A replay in which each link hands on messages in the order of sending."""
    for each, stages, micro_batches in ALL:
        if each is not schedule:
            continue
        lists = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
        chunks = 1 + max(one.chunk for one in lists[0])
        for passes in lists:
            for chunk in range(chunks):
                for kind in ("forward", "backward"):
                    assert [p.micro_batch for p in passes if p[:2] == (kind, chunk)] == [*range(micro_batches)]
        links: dict[tuple[str, int], list[int]] = {}  # what arrives for a kind of pass at a chunk of a stage
        last = stages * chunks - 1
        waiting, progress = [list(passes) for passes in lists], True
        while progress:
            progress = False
            for stage, passes in enumerate(waiting):
                while passes:
                    kind, chunk, micro_batch = passes[0]
                    at = chunk * stages + stage
                    if (kind, at) != ("forward", 0):
                        messages = links.setdefault((kind, at), [])
                        if not messages:
                            break
                        assert messages.pop(0) == micro_batch, "messages are needed in another order than they are sent"
                    if kind == "forward":
                        to = ("forward", at + 1) if at < last else ("backward", last)
                    else:
                        to = ("backward", at - 1)
                    links.setdefault(to, []).append(micro_batch)
                    passes.pop(0)
                    progress = True
        assert not any(waiting), (stages, micro_batches)


def test_arrays_are_the_lists():
    for schedule, stages, micro_batches in ALL:
        passes, runs = arrays(schedule, stages, micro_batches)
        at, found = 0, [[] for _ in range(stages)]
        for stage, count, times, step in runs:
            block = passes[at : at + count]
            found[stage] += [(kind, chunk, k + time * step) for time in range(times) for kind, chunk, k in block]
            at += count
        assert at == len(passes)
        for stage, rows in enumerate(found):
            expected = expand(schedule.runs(stage, stages, micro_batches))
            assert rows == [(one.kind == "backward", one.chunk, one.micro_batch) for one in expected]
