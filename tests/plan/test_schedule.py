"""Every schedule's lists of passes: complete, in order, without a circle; also of one with several chunks a stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import Pass, arrays, arrivals, chunks_in_flight, order

pipelines = st.integers(1, 6).flatmap(
    lambda stages: st.tuples(st.sampled_from(Schedule), st.integers(0, stages - 1), st.just(stages), st.integers(1, 12))
)
SIZES = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]
BACKWARDS = {"forward": "backward", "backward": "forward"}
INTERLEAVING = [(one, chunks) for one in Schedule for chunks in (1, 2, 3, 4) if one.of_chunks or chunks == 1]


def cases(chunks):
    """Stages and micro-batches of pipelines that may have so many chunks a stage."""
    return [(stages, micro_batches) for stages, micro_batches in SIZES if chunks == 1 or stages > 1]


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
    assert chunks_in_flight(*pipeline) == ((most,),)


def test_in_flight_is_the_textbooks():
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            where = stage, stages, micro_batches
            assert chunks_in_flight(Schedule.GPIPE, *where) == ((micro_batches,),)
            assert chunks_in_flight(Schedule.ONE_F_ONE_B, *where) == ((min(stages - stage, micro_batches),),)


@pytest.mark.parametrize(("schedule", "chunks"), INTERLEAVING, ids=str)
def test_stages_exchange_messages_in_one_order_and_never_wait_in_a_circle(schedule, chunks):
    """A replay in which each link between two stages hands on messages in the order of sending; each message brings how
    many of the other direction its sender had received."""
    for stages, micro_batches in cases(chunks):
        lists = [order(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)]
        for passes in lists:
            for chunk in range(chunks):
                for kind in ("forward", "backward"):
                    assert [p.micro_batch for p in passes if p[:2] == (kind, chunk)] == [*range(micro_batches)]
        links: dict[tuple[str, int], list[tuple[int, int, int]]] = {}  # arrivals for passes of a kind at a stage
        received = {(kind, stage): 0 for kind in ("forward", "backward", "turn") for stage in range(stages)}
        reported: list[list[int]] = [[] for _ in range(stages)]
        last = stages * chunks - 1
        waiting, progress = [list(passes) for passes in lists], True
        while progress:
            progress = False
            for stage, passes in enumerate(waiting):
                while passes:
                    kind, chunk, micro_batch = passes[0]
                    at = chunk * stages + stage
                    news = 0
                    if (kind, at) != ("forward", 0):
                        link = "turn" if (kind, at) == ("backward", last) else kind, stage
                        if not links.get(link):
                            break
                        *message, news = links[link].pop(0)
                        assert message == [at, micro_batch], "messages come in another order than they are sent"
                        received[link] += 1
                    reported[stage].append(news)
                    to = at + 1 if kind == "forward" else at - 1
                    if to > last:
                        links.setdefault(("turn", stage), []).append((at, micro_batch, 0))
                    elif to >= 0:
                        news = 0 if stages == 1 else received[BACKWARDS[kind], stage]
                        links.setdefault((kind, to % stages), []).append((to, micro_batch, news))
                    passes.pop(0)
                    progress = True
        assert not any(waiting), (stages, micro_batches)
        for stage in range(stages):
            assert reported[stage] == arrivals(lists.__getitem__, stage, stages, chunks), (stages, micro_batches, stage)


def test_arrays_are_the_lists():
    for schedule, chunks in INTERLEAVING:
        for stages, micro_batches in cases(chunks):
            passes, runs = arrays(schedule, stages, micro_batches, chunks)
            at, found = 0, [[] for _ in range(stages)]
            for stage, count, times, step in runs:
                block = passes[at : at + count]
                found[stage] += [(kind, chunk, k + time * step) for time in range(times) for kind, chunk, k in block]
                at += count
            assert at == len(passes)
            for stage, rows in enumerate(found):
                expected = order(schedule, stage, stages, micro_batches, chunks)
                assert rows == [(one.kind == "backward", one.chunk, one.micro_batch) for one in expected]


@given(st.integers(2, 8), st.integers(1, 40), st.integers(2, 4), st.data())
def test_what_chunks_hold_at_most_is_what_the_order_holds(stages, micro_batches, chunks, data):
    """For any memory of a micro-batch of each chunk, one of the peaks takes most of all moments."""
    stage = data.draw(st.integers(0, stages - 1))
    mib = data.draw(st.lists(st.integers(0, 50), min_size=chunks, max_size=chunks))
    held, most = [0] * chunks, 0
    for one in order(Schedule.ONE_F_ONE_B, stage, stages, micro_batches, chunks):
        held[one.chunk] += 1 if one.kind == "forward" else -1
        most = max(most, sum(n * each for n, each in zip(held, mib, strict=True)))
    peaks = chunks_in_flight(Schedule.ONE_F_ONE_B, stage, stages, micro_batches, chunks)
    assert max(sum(n * each for n, each in zip(peak, mib, strict=True)) for peak in peaks) == most


def test_equal_chunks_hold_what_the_textbook_says():
    """Activations of the first stage are 1 + (P - 1) / (P v) times those of 1F1B, which holds P micro-batches."""
    for stages, chunks in [(2, 2), (4, 2), (4, 4), (8, 3)]:
        peaks = chunks_in_flight(Schedule.ONE_F_ONE_B, 0, stages, 4 * stages, chunks)
        share = max(sum(peak) for peak in peaks) / chunks / stages
        assert share == pytest.approx(1 + (stages - 1) / (stages * chunks))
