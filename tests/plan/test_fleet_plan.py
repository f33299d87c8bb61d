"""PaddleFleet's rules of layers: results of its own code (data in ../shared), properties, and the settings that give
each layer what a plan gives it."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import yaml
from fleet import named
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.fleet import read_recipe
from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, Plan, Precision, Recompute, VocabStrategy
from paddlenlp_galvatron.plan.export import fleet_arguments
from paddlenlp_galvatron.plan.fleet_layers import FULL, MODULES, OF_THE_MODEL, division, offloaded, selected
from paddlenlp_galvatron.plan.mesh import Axis, Mesh

EXAMPLES = 300


@st.composite
def fleet_plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """Plans that PaddleFleet can have, and how many of their layers are for MTP."""
    tp, dp, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if pipeline > 2 else 1
    parts, most = pipeline * chunks, draw(st.integers(1, max(80 // (pipeline * chunks), 1)))
    stages = [most] * parts
    if parts > 1:
        stages[0], stages[-1] = draw(st.integers(1, most)), draw(st.integers(1, most))
        stages = stages if parts > 2 or most in stages else [most, stages[1]]
    mtp = draw(st.integers(0, 1))
    if mtp and parts > 1 and stages[-1] == 1 and max(stages[:-1]) == stages[-2]:
        stages[-1] = draw(st.integers(0, 1))  # the MTP layer is alone
    layers, most = sum(stages) + mtp, max(stages)
    stages[-1] += mtp
    count = draw(st.integers(0, most))
    recomputes = draw(
        st.one_of(
            st.lists(st.sampled_from([Recompute.NONE, *MODULES]), min_size=layers, max_size=layers),
            st.sampled_from(Recompute).map(
                lambda one: [one if one in MODULES or one is Recompute.FULL else Recompute.NONE] * layers
            ),
            st.just([Recompute.FULL if at < count else Recompute.NONE for part in stages for at in range(part)])
            if stages[0] == most and not mtp
            else st.nothing(),
        )
    )
    away = draw(st.sets(st.integers(0, layers - 1)))
    if mtp and (parts == 1 or stages[0] == most):
        away = away - {layers - 1} | ({layers - 1} if 0 in away else set())  # MTP's number is that of layer 0
    shards = dp > 1
    layer = LayerStrategy(tp, dp_type=DataParallel.ZERO2 if shards else DataParallel.DDP)
    times = draw(st.integers(2, 4)) if chunks > 1 else draw(st.integers(1, 4))
    micro_batches = pipeline * times if chunks > 1 else times + 1
    plan = Plan(
        world_size=tp * dp * pipeline,
        global_batch=micro_batches * dp,
        micro_batches=micro_batches,
        stages=tuple(stages),
        layers=tuple(
            replace(layer, recompute=one, offload=100 * (one is Recompute.FULL and at in away))
            for at, one in enumerate(recomputes)
        ),
        vocab=VocabStrategy(tp, dp_type=layer.dp_type),
        chunks=chunks,
        default_dp_type=layer.dp_type,
        assumed=Assumptions(
            sequence_parallel=tp > 1,
            mixed_precision=Precision.BF16,
            seq_length=tp * dp,
            fp32_gradients=True,
            flash_attention=draw(st.booleans()),
        ),
    )
    return plan, mtp


@settings(max_examples=EXAMPLES)
@given(fleet_plans())
def test_settings_select_the_layers_of_the_plan(drawn):
    plan, mtp = drawn
    experts = {"experts": 8, "experts_per_token": 2, "expert_size": 32}
    family = "deepseek_v3" if mtp else "qwen3_moe"
    model = replace(MODEL, layers=len(plan.layers), mtp_layers=mtp, vocab_size=1000, family=family, **experts)
    read = {"num_hidden_layers": model.main_layers} | yaml.safe_load(yaml.safe_dump(fleet_arguments(plan, model)))
    assert tuple(part.count("t") + part.count("m") for part in division(read)) == plan.stages
    chosen = selected(read)
    for kind, module in {**MODULES, Recompute.FULL: FULL}.items():
        wanted = {at for at, layer in enumerate(plan.layers) if layer.recompute is kind}
        assert chosen.get(module, frozenset()) == wanted
    recipe = read_recipe(read, model.having(model.main_layers, 0), plan.world_size)
    assert recipe.plan == plan and recipe.model == model


def fleet_ranks(order: str, world: int, pp: int, tp: int, ep: int) -> dict[str, set[frozenset[int]]]:
    """Groups of ranks by PaddleFleet's orders of axes (trainer/training_args.py 37e3442, and Paddle's topology.py): one
    grid of dense layers and, with experts, another one of these."""

    def groups(axes: dict[str, int], *along: str) -> set[frozenset[int]]:
        names = list(axes)
        grid = np.arange(world).reshape(list(axes.values()))
        last = [names.index(name) for name in along]
        moved = np.moveaxis(grid, last, range(-len(last), 0))
        return {frozenset(row) for row in moved.reshape(-1, prod(axes[name] for name in along)).tolist()}

    def grid(**inner: int) -> dict[str, int]:
        outer = {"pp": pp, "sharding": world // (pp * prod(inner.values()))}
        return ({name: outer[name] for name in ("sharding", "pp")} if order == "sharding_first" else outer) | inner

    dense = grid(inside=ep // tp, tp=tp) if ep > 1 else grid(tp=tp)
    found = {"tp": groups(dense, "tp"), "pp": groups(dense, "pp")}
    found["sharding"] = groups(dense, "sharding", "inside") if ep > 1 else groups(dense, "sharding")
    if ep > 1:
        found |= {"ep": groups(grid(ep=ep), "ep"), "moe_sharding": groups(grid(ep=ep), "sharding")}
    return found


def our_ranks(world: int, pp: int, tp: int, ep: int) -> dict[str, set[frozenset[int]]]:
    size = world // pp
    layer = LayerStrategy(tp, ep=ep, dp_type=DataParallel.ZERO2)

    def groups(mesh: Mesh, axis: Axis) -> set[frozenset[int]]:
        local = mesh.groups(axis) if mesh.degree(axis) > 1 else np.arange(size)[:, None]
        return {frozenset((stage * size + row).tolist()) for stage in range(pp) for row in local}

    dense, experts = layer.mesh(size), layer.experts.mesh(size)
    found = {"tp": groups(dense, Axis.TENSOR), "sharding": groups(dense, Axis.DATA)}
    found["pp"] = {frozenset(range(rank, world, size)) for rank in range(size)}
    if ep > 1:
        found |= {"ep": groups(experts, Axis.EXPERT), "moe_sharding": groups(experts, Axis.EXPERT_DATA)}
    return found


SETS = [
    (world, pp, tp, ep)
    for world in (8, 16, 32, 64, 96)
    for pp, tp, ep in product((1, 2, 3, 4, 6, 8, 12), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    if world % (pp * tp) == 0 and (ep == 1 or (world % (pp * ep) == 0 and ep % tp == 0))
]


def test_ranks_of_pp_first_are_those_of_the_plan():
    """In all sets of degrees; the default order has them where a pipeline or its replicas are one."""
    assert len(SETS) > 221
    assert all(fleet_ranks("pp_first", *degrees) == our_ranks(*degrees) for degrees in SETS)
    for world, pp, tp, ep in SETS:
        alike = fleet_ranks("sharding_first", world, pp, tp, ep) == our_ranks(world, pp, tp, ep)
        assert alike == (1 in (pp, world // (pp * max(tp, ep))))


@pytest.mark.parametrize("case", named("topology"))
def test_ranks_that_fleet_has(case):
    ranks = fleet_ranks(case["order"], case["world"] // case["dp"], case["pp"], case["tp"], case["ep"])
    of_rank_0 = {name: sorted(min(groups, key=min)) for name, groups in ranks.items()}
    if case["dp"] == 1:
        wanted = {name: group for name, group in case["group_of_rank_0"].items() if name != "dp"}
        assert of_rank_0 == wanted


@pytest.mark.parametrize("case", named("recompute"))
def test_layers_of_a_module(case):
    settings, module = {"num_hidden_layers": 8} | case["given"], case["module"]
    if "rejected" in case:
        with pytest.raises(UserError, match="recompute_"):
            selected(settings)
    elif case["layers"] == "on":
        assert module in OF_THE_MODEL and module in selected(settings)
    else:
        assert sorted(selected(settings).get(module, ())) == case["layers"]


@pytest.mark.parametrize("case", named("offload"))
def test_layers_whose_input_is_offloaded(case):
    assert sorted(offloaded({"num_hidden_layers": 8} | case["given"], case["settings"])) == case["layers"]


@pytest.mark.parametrize("case", named("division"))
def test_layers_of_a_chunk(case):
    settings = {
        "num_hidden_layers": case["layers"],
        "num_nextn_predict_layers": case["mtp"],
        "num_empty_layers_add_in_head": case["head"],
        "num_empty_layers_add_in_tail": case["tail"],
        "pipeline_model_parallel_size": case["pp"],
        "virtual_pipeline_model_parallel_size": case["vpp"],
        "separate_mtp_headloss": "MultiTokenPredictionLayer" in case["counted"],
    }
    assert [[part.count(item) for item in "temEL"] for part in division(settings)] == case["chunks_in_model_order"]


@pytest.mark.parametrize("case", named("division_uniform"))
def test_items_of_a_stage_of_ernie_pretrain(case):
    settings = {"stage": "ernie_pretrain", "pipeline_model_parallel_size": case["pp"], "num_nextn_predict_layers": 1}
    settings |= {"num_hidden_layers": "".join(case["stages"]).count("t"), "num_empty_layers_add_in_tail": 2}
    assert division(settings | {"enable_mtp_magic_send": True}) == case["stages"]


WRONG = [
    pytest.param({"pipeline_model_parallel_size": 3}, "3 chunks of stages do not divide 8 layers", id="stages"),
    pytest.param({"num_hidden_layers": ...}, "num_hidden_layers: missing", id="no number of layers"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_fleet_cannot_divide(changed, message):
    settings = {name: value for name, value in ({"num_hidden_layers": 8} | changed).items() if value is not ...}
    with pytest.raises(UserError, match=message):
        division(settings)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 6), st.data())
def test_a_division_keeps_the_order_of_all_layers(stages, chunks, each, data):
    slots = stages * chunks * each
    head = data.draw(st.integers(0, slots - 1))
    tail = data.draw(st.integers(0, slots - 1 - head))
    settings = {
        "num_hidden_layers": slots - head - tail,
        "num_empty_layers_add_in_head": head,
        "num_empty_layers_add_in_tail": tail,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
    }
    parts = division(settings)
    assert "".join(parts) == "E" + "e" * head + "t" * (slots - head - tail) + "N" + "e" * tail + "L"
    assert {part.count("t") + part.count("e") for part in parts} == {each}
