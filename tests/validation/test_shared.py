"""Steps where ranks share processors, against the simulation of ranks that do not, and against work that is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.check.validation.shared import shared_step
from paddlenlp_galvatron.cost_model.simulate import StageTimes, step_ms
from paddlenlp_galvatron.plan import LayerStrategy, Plan, Schedule, VocabStrategy

MS = st.floats(0.1, 50)


@st.composite
def pipelines(draw: st.DrawFn, sends: st.SearchStrategy[float]) -> tuple[Plan, StageTimes]:
    stages, size, micro_batches = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2])), draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(Schedule))
    chunks = draw(st.integers(1, 3)) if stages > 1 and schedule.of_chunks else 1
    total = stages * chunks

    def several(ms: st.SearchStrategy[float], count: int) -> list[float]:
        return draw(st.lists(ms, min_size=count, max_size=count))

    plan = Plan(
        world_size=stages * size,
        global_batch=micro_batches,
        micro_batches=micro_batches,
        stages=(1,) * total,
        layers=(LayerStrategy(degree=size),) * total,
        vocab=VocabStrategy(degree=size),
        schedule=schedule,
        chunks=chunks,
    )
    return plan, StageTimes(several(MS, total), several(MS, total), several(MS, stages), several(sends, total - 1))


@given(pipelines(sends=st.floats(0, 20)))
def test_ranks_with_processors_of_their_own(pipeline: tuple[Plan, StageTimes]) -> None:
    plan, times = pipeline
    found_ms, speeds = shared_step(plan, times, plan.world_size)
    assert found_ms == pytest.approx(step_ms(plan.schedule, times, plan.micro_batches), rel=1e-9)
    assert speeds == pytest.approx([1.0] * plan.pipeline)


@given(pipelines(sends=st.just(0.0)))
def test_a_processor_that_stages_share_never_rests(pipeline: tuple[Plan, StageTimes]) -> None:
    """With no messages on their way some stage always works, and has all of the one processor if it is alone."""
    plan, times = pipeline
    work_ms = plan.micro_batches * (sum(times.forward) + sum(times.backward)) + sum(times.sync)
    found_ms, speeds = shared_step(plan, times, plan.stage_size)
    assert found_ms == pytest.approx(work_ms / plan.pipeline, rel=1e-9)
    assert all(1 - 1e-9 <= speed <= plan.pipeline * (1 + 1e-9) for speed in speeds)


@given(pipelines(sends=st.floats(0, 20)))
def test_more_processors_than_half_make_no_pass_slower(pipeline: tuple[Plan, StageTimes]) -> None:
    plan, times = pipeline
    assert shared_step(plan, times, max(plan.world_size // 2, 1))[0] <= (
        step_ms(plan.schedule, times, plan.micro_batches) * (1 + 1e-9)
    )
