"""The terms of a plan's breakdown add up to its prediction, for any plan."""

from dataclasses import replace
from itertools import pairwise

import pytest
from cost_examples import MODEL, SEQ, example, example_plan, one_node

from paddlenlp_galvatron.cost_model import CostModel, CostOptions, Task, timeline
from paddlenlp_galvatron.cost_model.facts import COMMUNICATION, PlanFacts
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Plan, Recompute, Schedule, VocabStrategy

DDP, ZERO2, ZERO3 = DataParallel
MIXED = (
    LayerStrategy(2, dp_type=ZERO3),
    LayerStrategy(4, recompute=True, dp_type=ZERO2),
    LayerStrategy(2, ulysses=True, dp_type=ZERO3, recompute=True),
    LayerStrategy(1),
)
CONTEXT = (
    LayerStrategy(2, context=2, dp_type=ZERO3, recompute=Recompute.NORMS),
    LayerStrategy(1, context=4, recompute=Recompute.ATTENTION),
    LayerStrategy(2, context=2, ulysses=True, recompute=Recompute.NORMS | Recompute.MLP),
    LayerStrategy(4, recompute=Recompute.FULL),
)
PLAN = Plan(8, 32, 4, (1, 3), MIXED, VocabStrategy(2, dp_type=ZERO3))
PLANS = {
    "two stages": (PLAN, example()),
    "gpipe": (replace(PLAN, schedule=Schedule.GPIPE), example()),
    "four stages": (replace(PLAN, stages=(1, 1, 1, 1), layers=(LayerStrategy(2),) * 4, micro_batches=8), example()),
    "two chunks a stage": (replace(PLAN, stages=(1, 1, 1, 1), chunks=2), example()),
    "context parallel, parts recomputed": (replace(PLAN, layers=CONTEXT), example()),
    "one stage": (replace(PLAN, stages=(4,)), example()),
    "one micro-batch": (replace(PLAN, stages=(4,), micro_batches=1), one_node()),
    "reduced each time": (PLAN, one_node(async_grad_reduce=False)),
    "strided, without Megatron-SP": (
        replace(PLAN, layers=(LayerStrategy(2, consecutive=False), *MIXED[1:2], LayerStrategy(2), LayerStrategy(4))),
        example(sequence_parallel=False),
    ),
    "tied": (PLAN, example(model=replace(MODEL, tied_embeddings=True))),
    "lora": (PLAN, example(options=CostOptions(task=Task(16)))),
    "packed": (PLAN, example(options=CostOptions(task=Task(document_tokens=100)))),
    "packed, adapters, reduced each time": (
        PLAN,
        one_node(options=CostOptions(task=Task(8, document_tokens=100)), async_grad_reduce=False),
    ),
}


@pytest.mark.parametrize(("plan", "cost"), PLANS.values(), ids=PLANS)
def test_every_term_adds_up_to_the_prediction(plan: Plan, cost: CostModel):
    plan = replace(plan, assumed=cost.assumed)
    prediction = cost.predict(plan)
    budget_mib = 5000.0
    stages = PlanFacts(plan, prediction, cost, None, budget_mib).stages
    for stage, predicted in zip(stages, prediction.stages, strict=True):
        busy_ms = plan.micro_batches * sum(predicted.passes_ms) + predicted.sync_ms
        assert sum(stage.time_ms.values()) == pytest.approx(prediction.time_s * 1000)
        assert stage.busy_ms == pytest.approx(busy_ms)
        assert sum(stage.memory_mib.values()) == pytest.approx(budget_mib)
        held = sum(mib for term, mib in stage.memory_mib.items() if term != "free")
        assert held == pytest.approx(predicted.memory.total_mib)
        assert all(ms > -1e-9 for ms in [*stage.time_ms.values(), *stage.hidden_ms.values()])
        for term, ms in stage.time_ms.items():
            if term not in ("waiting", "layouts"):
                assert sum(part.time_ms.get(term, 0.0) for part in stage.parts) == pytest.approx(ms)
    assert any(stage.time_ms[term] for stage in stages for term in COMMUNICATION)
    waits = sum(stage.time_ms["waiting"] for stage in stages)
    assert waits / len(stages) == pytest.approx(prediction.bubble_share * prediction.time_s * 1000, abs=1e-6)


@pytest.mark.parametrize(("plan", "cost"), PLANS.values(), ids=PLANS)
def test_waiting_is_what_the_time_line_leaves_free(plan: Plan, cost: CostModel):
    plan = replace(plan, assumed=cost.assumed)
    prediction = cost.predict(plan)
    spans = timeline(plan.schedule, prediction.times, plan.micro_batches)
    for number, stage in enumerate(PlanFacts(plan, prediction, cost, None).stages):
        mine = [span for span in spans if span.stage == number]
        idle = sum(after.start_ms - before.stop_ms for before, after in pairwise(mine))
        idle += mine[0].start_ms + prediction.time_s * 1000 - mine[-1].stop_ms
        assert stage.time_ms["waiting"] == pytest.approx(idle, abs=1e-6)


def test_each_strategy_has_the_terms_that_it_pays_for():
    cost = one_node()
    plan = replace(PLAN, stages=(4,), assumed=cost.assumed)
    (stage,) = PlanFacts(plan, cost.predict(plan), cost, None).stages
    embedding, zero3, recomputing, ulysses, plain = stage.parts
    assert embedding.name == "embedding, LM head" and embedding.time_ms["vocabulary"] > 0
    assert zero3.time_ms["tensor"] > 0 and zero3.time_ms["gathers"] + zero3.hidden_ms["gathers"] > 0
    assert recomputing.time_ms["recompute"] == pytest.approx(recomputing.time_ms["forward"])
    assert recomputing.time_ms["publish"] > 0 and "gathers" not in recomputing.time_ms
    assert ulysses.time_ms["tensor"] > 0
    assert "tensor" not in plain.time_ms and plain.hidden_ms["gradients"] > 0
    assert zero3.memory_mib["moments"] < plain.memory_mib["moments"] / 3


def test_what_gathering_again_spares_is_reported():
    """Two inputs of each layer that recomputes nothing, as far as they are of other ranks."""
    model = one_node()
    layers = LayerStrategy(2), LayerStrategy(4, recompute=True), LayerStrategy(2, ulysses=True), LayerStrategy(1)
    plan = example_plan(model, layers=layers)
    facts = PlanFacts(plan, model.predict(plan), model, MODEL)
    tokens_mib = 4 * SEQ * MODEL.hidden_size * 2 / 2**20  # of 4 samples
    assert facts.spared_mib == pytest.approx(2 * tokens_mib / 2)
    alone = example_plan(model)
    assert replace(facts, plan=alone, prediction=model.predict(alone)).spared_mib == 0
