"""The order of passes in a pipeline."""

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import Schedule
from paddlenlp_galvatron.plan.schedule import Pass, in_flight, order

pipelines = st.integers(1, 6).flatmap(
    lambda stages: st.tuples(st.sampled_from(Schedule), st.integers(0, stages - 1), st.just(stages), st.integers(1, 12))
)


@given(pipelines)
def test_each_micro_batch_goes_forward_once_and_then_backward_once(pipeline):
    passes = order(*pipeline)
    micro_batches = pipeline[-1]
    for kind in ("forward", "backward"):
        assert [p.micro_batch for p in passes if p.kind == kind] == list(range(micro_batches))
    for k in range(micro_batches):
        assert passes.index(Pass("forward", k)) < passes.index(Pass("backward", k))


@given(pipelines)
def test_in_flight_is_what_the_order_holds(pipeline):
    held = most = 0
    for one in order(*pipeline):
        held += 1 if one.kind == "forward" else -1
        most = max(most, held)
    assert in_flight(*pipeline) == most


@given(st.sampled_from(Schedule), st.integers(1, 6), st.integers(1, 12))
def test_the_stages_never_wait_for_each_other_in_a_circle(schedule, stages, micro_batches):
    """A forward needs the stage before, a backward the stage after; every stage gets to its end."""
    waiting = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    done: set[tuple[int, Pass]] = set()
    progress = True
    while progress:
        progress = False
        for stage, passes in enumerate(waiting):
            while passes:
                neighbour = stage - 1 if passes[0].kind == "forward" else stage + 1
                if 0 <= neighbour < stages and (neighbour, passes[0]) not in done:
                    break
                done.add((stage, passes.pop(0)))
                progress = True
    assert not any(waiting)
