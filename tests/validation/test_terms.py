"""Where a traced step's time goes; how plans are drawn; errors, tau and regret."""

from dataclasses import replace
from io import StringIO

import pytest
from cost_examples import MODEL
from rich.console import Console

from paddlenlp_galvatron.check.validation import accuracy
from paddlenlp_galvatron.check.validation.accuracy import TERMS, Spread, measured_ms
from paddlenlp_galvatron.check.validation.plans import sample_plans
from paddlenlp_galvatron.check.validation.work import MeasuredPlan, Step, Visit, key_of
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Recompute


def span(category: str, start_ms: float, stop_ms: float, name: str = "") -> dict:
    return {"cat": category, "name": name or category, "ts": 1000 * start_ms, "dur": 1000 * (stop_ms - start_ms)}


def test_every_moment_counts_for_the_innermost_span_that_has_a_term():
    spans = [
        span("wait", 0, 2), span("forward", 2, 12), span("gather", 3, 5), span("collective", 3, 4, "all_gather"),
        span("collective", 6, 8, "all_gather"), span("layout", 8, 11), span("collective", 9, 10, "all_to_all"),
        span("backward", 12, 30), span("recompute", 12, 20), span("collective", 14, 15, "reduce_scatter"),
        span("gradients", 25, 29), span("collective", 26, 29, "all_reduce"), span("sync", 30, 32),
        span("collective", 32, 35, "all_reduce"), span("optimizer", 35, 45), span("collective", 36, 37, "all_reduce"),
        span("collective", 40, 44, "all_gather"),
    ]  # fmt: skip
    assert measured_ms(reversed(spans), 50) == {
        "waiting": 2, "forward": 10 - 2 - 2 - 3, "gathers": 2, "tensor": 2 + 1, "layouts": 3, "backward": 18 - 8 - 4,
        "recompute": 8 - 1, "offload": 0, "gradients": 4 + 2, "optimizer": 10 - 1 - 4, "publish": 4, "idle": 3 + 1 + 5,
    }  # fmt: skip


def test_terms_add_up_to_the_step():
    spans = [span("forward", 0, 3), span("collective", 1, 2), span("data", 4, 5)]
    terms = measured_ms(spans, 7)
    assert sum(terms.values()) == pytest.approx(7) and set(terms) == set(TERMS)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_plans_are_drawn_alike_by_seed_across_all_kinds_and_dimensions(world_size):
    shape, assumed = replace(MODEL, layers=4), Assumptions(seq_length=512)

    def drawn(seed: int) -> list:
        return list(sample_plans(shape, world_size, 16, assumed, 80, seed, lambda plan: True))

    first = drawn(7)
    assert first == drawn(7) and {key_of(plan) for _, plan in first} != {key_of(plan) for _, plan in drawn(8)}
    assert len({plan for _, plan in first}) == len(first) == 80 and {kind for kind, _ in first} == {"uniform", "mixed"}
    plans = [plan for _, plan in first]
    layers = [layer for plan in plans for layer in plan.layers]
    for several in (
        {len(plan.stages) for plan in plans},
        {plan.micro_batches for plan in plans},
        {plan.schedule for plan in plans},
        {plan.vocab.degree for plan in plans},
        {layer.degree for layer in layers},
        {layer.ulysses for layer in layers},
        {layer.recompute for layer in layers},
    ):
        assert len(several) > 1
    assert len({layer.dp_type for layer in layers}) == 3
    assert all(len(set(plan.layers)) == 1 for kind, plan in first if kind == "uniform")


def test_a_space_that_is_used_up_ends_the_drawing():
    few = list(sample_plans(replace(MODEL, layers=1), 1, 1, Assumptions(seq_length=512), 1000, 0, lambda plan: True))
    assert 0 < len(few) < 1000


def test_errors_keep_their_signs_at_the_ends():
    assert Spread.of([-0.2, 0.1, 0.0]) == Spread(pytest.approx(0.1), 0.1, -0.2, 0.1)


def test_tables_of_plans_fit_eighty_columns():
    terms = dict.fromkeys(TERMS, 1234.5)
    stage = accuracy.StageOutcome(terms, {**terms, "gradients": 99999.0}, 123456.7, 140000.0, 123456.7)
    layers = (LayerStrategy(), LayerStrategy(recompute=Recompute.NORMS | Recompute.ATTENTION))
    plan = Plan(1, 8, 2, (2,), layers)
    outcome = accuracy.PlanOutcome(plan, "recomputing", 123.4567, 234.5678, (stage,), 0, 0)
    text = StringIO()
    Console(file=text, width=80).print(*accuracy.accuracy_tables(accuracy.Accuracy([outcome])), sep="\n")
    assert "…" not in text.getvalue()
    assert "at fault" in text.getvalue()


def test_of_all_visits_the_third_quickest_of_15_steps_counts():
    def visit(slowness: float) -> Visit:
        steps = tuple(
            Step(seconds=slowness + number, terms_ms=({"forward": slowness + number},)) for number in range(5)
        )
        return Visit(steps=steps, peaks_mib=(slowness, 7.0), bytes={"send": 3})

    run = MeasuredPlan.of([visit(0.3), visit(0.2), visit(0.9)])
    assert run.step.seconds == 0.9 and run.step.terms_ms == ({"forward": 0.9},)
    assert run.peaks_mib == (0.9, 7.0) and run.bytes == {"send": 3} and run.quickest_s == (0.3, 0.2, 0.9)
