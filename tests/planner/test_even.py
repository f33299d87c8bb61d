"""Plans for other programs' trainers: the fastest of all that they can run, by trying every one of them."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest
from cost_examples import MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.options.model_options import Model
from paddlenlp_galvatron.plan import DataParallel, Plan, Recompute
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.export import PROGRAMS, fleet_arguments, gaps, stock_arguments
from paddlenlp_galvatron.planner import SearchOptions, search
from paddlenlp_galvatron.planner.gap_costs import costs_of_gaps
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.planner.space import Space, families, without_experts
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

SMALL = replace(MODEL, layers=4)


def asked(trainer: str, gib: float, **more) -> SearchOptions:
    return SearchOptions(
        trainer=trainer,
        num_gpus_per_node=4,
        memory_constraint=gib,
        settle_bsz=8,
        seq_length=512,
        context_mib=0,
        device="h100-80gb",
        gap=0,
        **more,
    )


def cost_of(options: SearchOptions, model=SMALL):
    sheet = load_data_sheet("h100-80gb")
    return derive(model, sheet, 1, 4, options.assumptions, options.cost_options)


def fastest(options: SearchOptions, model=SMALL, chunks: int = 1) -> float:
    """The least step time, ms, over every plan with one strategy, and so many chunks a stage, that the program can run
    and that fits."""
    cost, best = cost_of(options, model), inf
    space = Space(cost.models[-1], cost.assumed, options, cost, len(cost.models) - 1)
    like, has = bare(cost, options, model), [cost.models[kind].experts > 0 for kind in cost.layer_types]
    kinds = [[each for each in options.recomputes if experts or each is not Recompute.GATE_UP] for experts in has]
    for family in families(options, 4, model.layers):
        if chunks > 1 and family.stages == 1:
            continue
        cuts = combinations(range(1, model.layers), family.stages * chunks - 1)
        divisions = [tuple(stop - at for at, stop in pairwise((0, *each, model.layers))) for each in cuts]
        for layer in space.layers(family):
            if layer.recompute:
                continue
            for vocab in space.vocabularies(family):
                for stages, again in product(divisions, product(*kinds)):
                    if Recompute.FULL in again and {*again} - {Recompute.FULL, Recompute.NONE}:
                        continue
                    plan = replace(
                        like,
                        global_batch=family.global_batch,
                        micro_batches=family.micro_batches,
                        stages=stages,
                        layers=tuple(
                            replace(layer if experts else without_experts(layer), recompute=one)
                            for one, experts in zip(again, has, strict=True)
                        ),
                        vocab=vocab,
                        schedule=family.schedule,
                        chunks=chunks,
                    )
                    if gaps(plan, PROGRAMS[options.trainer], model) or find_faults(plan, model):
                        continue
                    found = cost.predict(plan)
                    if max(stage.memory.total_mib for stage in found.stages) <= options.budget_mib:
                        best = min(best, found.time_s)
    return best


def used_gib(stage) -> float:
    return stage.memory.total_mib / 1024


def bare(cost, options, model):
    return search(model, cost, options.model_copy(update={"memory_constraint": 1000.0, "trainer": "galvatron"})).plan


EXPERTS = replace(SMALL, family="qwen3_moe", layers=2, experts=8, experts_per_token=2, expert_size=1024)

FEW = {"settle_chunk": 4, "max_tp_deg": 1, "max_pp_deg": 2, "pipeline_type": "pipedream_flush"}


@pytest.mark.parametrize(
    ("trainer", "model", "limits"),
    [
        pytest.param("paddlenlp", SMALL, {}, id="PaddleNLP"),
        pytest.param("paddlefleet", SMALL, {}, id="PaddleFleet"),
        pytest.param("paddlefleet", replace(SMALL, layers=3), {}, id="PaddleFleet, stages of unlike lengths"),
        pytest.param("paddlefleet", EXPERTS, {}, id="PaddleFleet, experts"),
        pytest.param("paddlefleet", replace(EXPERTS, dense_layers=(0,)), {}, id="PaddleFleet, a dense layer in front"),
        pytest.param("paddlefleet", replace(SMALL, layers=6), FEW, id="PaddleFleet, six layers"),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
def test_no_plan_that_the_program_can_run_is_faster(trainer, model, limits, share):
    roomy = asked(trainer, 1000, **limits)
    free = search(model, cost_of(roomy, model), roomy).require()
    gib = share * max(map(used_gib, free.prediction.stages))
    options = asked(trainer, gib, **limits)
    found = search(model, cost_of(options, model), options)
    assert found.time_s == pytest.approx(fastest(options, model)) and (found.best is None or found.gap == 0)
    if found.best:
        arguments = {"paddlenlp": stock_arguments, "paddlefleet": fleet_arguments}[trainer]
        assert arguments(found.plan, model)


@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
def test_chunks_are_as_fast_as_any_within_the_gap(share):
    model, limits = replace(SMALL, layers=8), {"settle_chunk": 8, "max_tp_deg": 1, "pipeline_type": "pipedream_flush"}
    roomy = asked("paddlefleet", 1000, **limits, max_virtual_pp_deg=2)
    gib = share * max(map(used_gib, search(model, cost_of(roomy, model), roomy).require().prediction.stages))
    options = asked("paddlefleet", gib, **limits, max_virtual_pp_deg=2)
    result, one = (search(model, cost_of(each, model), each) for each in (options, asked("paddlefleet", gib, **limits)))
    least = min(one.time_s, fastest(options, model, chunks=2))
    assert result.time_s * (1 - result.gap) <= least * (1 + 1e-9) and result.time_s == pytest.approx(least)


@pytest.mark.parametrize(
    ("name", "values", "field", "others"),
    [
        pytest.param("degree", [2, 2, 1, 2], "tp_sizes_enc", [1, 2], id="degrees"),
        pytest.param("dp_type", [*["zero2"] * 3, "zero3"], "dp_types_enc", ["ddp", "zero2", "zero3"], id="ZeRO"),
        pytest.param(
            "recompute", [Recompute.MLP, *[Recompute.NONE] * 3], "recompute_enc", [Recompute.NONE], id="parts"
        ),
        pytest.param("offload", [50, 0, 0, 0], "offload_enc", [0], id="activations in the host's memory"),
    ],
)
def test_the_cost_of_a_field_is_that_of_the_plan_that_differs_in_it_alone(name, values, field, others):
    options = asked("paddlefleet", 70)
    cost = cost_of(options)

    def having(values) -> Plan:
        values = [DataParallel(value) if name == "dp_type" else value for value in values]
        layers = tuple(replace(layer, **{name: value}) for layer, value in zip(like.layers, values, strict=True))
        vocab = replace(like.vocab, **{name: values[0]}) if hasattr(like.vocab, name) else like.vocab
        return replace(like, layers=layers, vocab=vocab)

    like = search(SMALL, cost, options.model_copy(update={"max_pp_deg": 1, "max_tp_deg": 1})).plan
    words = costs_of_gaps(having(values), Question(Model((SMALL,), 512), options, cost), "paddlefleet")
    least = min(cost.predict(having([value] * 4)).time_s for value in others)
    change = least / cost.predict(having(values)).time_s - 1
    assert words[field] == f"; this field alone: {abs(change):.1%} {'slower' if change >= 0 else 'faster'}"


def test_what_cannot_be_even_is_reported():
    with pytest.raises(UserError, match="max_virtual_pp_deg: for paddlenlp only one chunk"):
        SearchOptions.from_values({"trainer": "paddlenlp", "max_virtual_pp_deg": 2})
    odd = replace(SMALL, layers=3)
    options = asked("paddlenlp", 1000, max_pp_deg=4)
    assert search(odd, cost_of(options, odd), options).plan.pipeline == 1


def test_models_that_are_planned_alone_are_refused():
    model = replace(SMALL, window=128)
    options = asked("paddlefleet", 1000)
    with pytest.raises(UserError, match="trainer: windows of attention of"):
        search(model, cost_of(options, model), options)
