"""Searches of dense layers and layers with experts of one model find the optimum of exhaustive enumeration."""

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from paddlenlp_galvatron.options.model_options import Model
from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.planner import SearchOptions, branches, search, space
from paddlenlp_galvatron.planner.explain import explain
from paddlenlp_galvatron.planner.question import on_device, prices

from .random_cost import RandomCost, best_by_enumeration, every_plan, model_of


def check(seed: int, dense_layers: tuple[int, ...], layers: int, mtp: int = 0, **fixed: Any) -> str:
    """Where dense layers in front are in the plan."""
    draw = random.Random(seed)
    values = {
        "num_gpus_per_node": draw.choice((2, 3, 4)) if layers < 4 else 2,
        "memory_constraint": draw.uniform(0.3, 4),
        "settle_bsz": draw.choice((2, 4, 6)),
        "seq_length": 12,
        "sequence_parallel": draw.random() < 0.5,
        "sp_space": draw.choice(("tp", "sp")),
        "max_ep_deg": draw.choice((1, 2)),
        "max_etp_deg": 1,
        "disable_ckpt": True,
        "disable_sdp": draw.random() < 0.7 or layers > 3,
        "disable_vtp": draw.random() < 0.5,
        "pipeline_type": draw.choice((None, "gpipe", "pipedream_flush")),
    }
    options = SearchOptions.from_mapping({"gap": 0} | values | fixed)
    models = [model_of(layers, dense_layers=dense_layers, mtp=mtp)]
    cost = RandomCost(models, options, seed)
    cost.neighbours = seed % 2 == 1
    cost.options = replace(cost.options, freed=(None, 0.0, 0.8)[seed % 3])
    result, best = search(models, cost, options), best_by_enumeration(models, cost, options)
    if best == inf:
        assert result.best is None, seed
        return "nothing fits"
    assert result.best is not None, seed
    batch = result.plan.global_batch
    assert result.lower_bound_s / batch <= best * (1 + 1e-9) <= result.time_s / batch * (1 + 2e-9), seed
    if mtp:  # its resharding breaks the triangle inequality, as crooked prices do
        assert result.time_s / batch <= best * 1.05, seed
    elif options.max_virtual_pp_deg == 1:
        assert result.time_s / batch == pytest.approx(best, rel=1e-9), seed
        assert result.gap <= 1e-9, seed
    assert find_faults(result.plan, models[0]) == []
    assert max(stage.memory.total_mib for stage in result.best.prediction.stages) <= options.memory_constraint * 1024
    known = search(models, cost, options, known=[result.plan])
    assert known.time_s == pytest.approx(result.time_s)
    front = next(index for index in range(layers) if index not in dense_layers)
    if result.plan.pipeline == 1:
        return "one stage"
    return "alone" if result.plan.stages[0] <= front else "with others"


@pytest.mark.parametrize(
    ("dense_layers", "layers", "end"),
    [((0,), 3, 14), ((0, 1), 3, 10), ((0,), 4, 24), ((1,), 3, 8), ((2,), 3, 6), ((0, 2), 3, 6)],
)
def test_equals_exhaustive_enumeration(dense_layers: tuple[int, ...], layers: int, end: int) -> None:
    found = [check(seed, dense_layers, layers) for seed in range(end)]
    assert found.count("nothing fits") < end / 2
    if dense_layers == (0,):
        assert {3: "alone", 4: "with others"}[layers] in found


def test_mtp_behind_the_last_layer_is_near_the_optimum_and_its_bound_holds() -> None:
    found = [check(seed, (0,), 3, mtp=1) for seed in range(10)]
    assert found.count("nothing fits") < 5 and "alone" in found


def test_one_strategy_for_all_layers_leaves_out_that_of_experts_in_dense_ones() -> None:
    found = [check(seed, (0,), 3, fine_grained_mode=False, disable_vtp=False) for seed in range(8)]
    assert found.count("nothing fits") < 5


@pytest.mark.parametrize(("dense", "mtp"), [((0,), 0), ((), 1)], ids=["dense layers", "MTP"])
def test_chunks_take_the_first_and_the_last_layers_for_vocabulary(
    dense: tuple[int, ...], mtp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumeration has dense layers in other chunks, too, and MTP in another layout than the LM head's."""
    every = branches.Branches.strategies
    of_chunks = lambda mine: {family: spaces for family, spaces in every(mine).items() if family.chunks > 1}  # noqa: E731
    monkeypatch.setattr(branches.Branches, "strategies", of_chunks)
    values = {"gap": 0, "num_gpus_per_node": 4, "memory_constraint": 4, "settle_bsz": 4, "settle_chunk": 2}
    values |= {"max_ep_deg": 1, "seq_length": 12, "disable_sdp": True, "disable_ckpt": True, "max_virtual_pp_deg": 2}
    options = SearchOptions.from_mapping(values)
    models = [replace(model_of(5, dense_layers=(0,), mtp=mtp), dense_layers=dense)]
    for seed in range(2):
        cost = RandomCost(models, options, seed)
        spaces = [each for some in branches.Branches(cost, options).strategies().values() for each in some]
        plans = [one for one in every_plan(models, cost, options) if one.plan.chunks > 1]
        own = [one for one in plans if any(each.have(one.plan, cost.layer_types) for each in spaces)]
        best = min(one.ms_per_sample / 1000 for one in own)
        result = search(models, cost, options)
        assert result.lower_bound_s / 4 <= best * (1 + 1e-9) <= result.time_s / 4 * (1 + 2e-9) <= best * 1.01


def test_many_dense_layers_in_front_are_layers_as_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MOST_IN_FRONT", 0)
    assert [check(seed, (0,), 3) for seed in range(4)].count("nothing fits") < 3


AIR = ModelShape("glm-4.5-air-like", "qwen3_moe", 46, 4096, 10944, 96, 8, 151552, 131072, own_head_dim=128)
AIR = replace(AIR, experts=128, experts_per_token=8, expert_size=1408, norm_topk=True, dense_layers=(0,))
QWEN = ModelShape("qwen2-moe-like", "qwen2_moe", 24, 2048, 5632, 16, 16, 151936, 8192, dense_layers=(0, 1))
QWEN = replace(QWEN, experts=60, experts_per_token=4, expert_size=1408, shared_size=5632)


@pytest.mark.parametrize(
    ("model", "nodes", "batch"),
    [(AIR, 8, 512), pytest.param(QWEN, 1, 256, marks=pytest.mark.slow)],
    ids=lambda of: str(of)[:20],
)
def test_published_sizes_are_proven_optimal_and_explained(model: ModelShape, nodes: int, batch: int) -> None:
    values = {"seq_length": 4096, "num_nodes": nodes, "num_gpus_per_node": 8, "settle_bsz": batch}
    options = SearchOptions.from_values({**values, "gap": 0, "device": "h100-80gb", "mixed_precision": "bf16"})
    question = on_device(Model((model,), 4096), options, prices((model,), options))
    found = question.search()
    assert found.fastest_gap == 0 and found.plan.metadata["searched_from"]["model_fingerprint"] == model.fingerprint
    assert find_faults(found.plan, model) == []
    if model is QWEN:
        explained = explain(found.plan, question)
        assert explained.searched.uniform and explained.searched.fastest_gap == 0
        dense = {one.layer in model.dense_layers for one in explained.one_layer.others}
        assert dense == {True, False}
        assert "layers 0-1 (dense)" in {part.name for stage in explained.stages for part in stage.parts}


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        pytest.param({"dense_layers": (0, 2)}, 4, id="dense and sparse"),
        pytest.param({"window": 4, "full_layers": (1, 3)}, 4, id="windows"),
        pytest.param({"window": 4, "full_layers": (1, 3)}, 5, id="a layer behind the last period"),
    ],
)
def test_layers_that_alternate_are_searched_by_periods(
    changed: dict[str, Any], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "MOST_RUNS", 2)
    space.runs_of.cache_clear()
    model = replace(model_of(layers), **changed)
    found = 0
    for seed in range(4):
        values = {"num_gpus_per_node": 2, "memory_constraint": 3, "settle_bsz": 4, "seq_length": 12, "gap": 0}
        options = SearchOptions.from_mapping(values | {"disable_sdp": True, "disable_ckpt": True, "disable_vtp": True})
        cost = RandomCost([model], options, seed)
        result = search([model], cost, options)
        spaces = [one for some in branches.Branches(cost, options).strategies().values() for one in some]
        plans = every_plan([model], cost, options)
        own = (one for one in plans if any(each.have(one.plan, cost.layer_types) for each in spaces))
        best = min((one.ms_per_sample / 1000 for one in own), default=inf)
        found += result.best is not None
        if result.best:
            assert find_faults(result.plan, model) == []
            assert result.time_s / result.plan.global_batch == pytest.approx(best, rel=1e-9), seed
    space.runs_of.cache_clear()
    assert found


def test_layers_that_alternate_without_a_period_are_refused() -> None:
    values = {"num_gpus_per_node": 1, "memory_constraint": 1, "settle_bsz": 2, "seq_length": 12}
    options = SearchOptions.from_mapping({"gap": 0} | values)
    models = [model_of(12, dense_layers=(0, 2, 4, 6, 7, 9))]
    with pytest.raises(Exception, match="runs without a period, of which at most 8 are searched"):
        search(models, RandomCost(models, options, 1), options)
