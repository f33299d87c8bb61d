"""Recipes of PaddleFleet: what is read, what is noted and what is refused. The recipes are data in ../shared."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fleet import DATA
from plans import MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.fleet import read_recipe
from paddlenlp_galvatron.options.fleet_fields import options_of
from paddlenlp_galvatron.plan import DataParallel, ModelShape, Recompute, load_model
from paddlenlp_galvatron.plan.export import fleet_arguments
from paddlenlp_galvatron.plan.fleet_layers import HEAD, TAIL

TABLE = Path(__file__).parents[2] / "docs" / "dev" / "paddlefleet_recipes.md"
RECIPES = sorted((DATA / "recipes").glob("*.yaml"))
DENSE = replace(MODEL, layers=8, vocab_size=1000, max_position_embeddings=1 << 18)
WITH_MTP = replace(load_model("deepseek-v3"), vocab_size=1000)
TAIL_3 = {"num_nextn_predict_layers": 1, "pipeline_model_parallel_size": 4, "num_empty_layers_add_in_tail": 3}
EXPERTS = replace(DENSE, family="qwen3_moe", experts=64, experts_per_token=2, expert_size=32, dense_layers=(0,))
BASE = {"stage": "PT", "fine_tuning": "full", "bf16": True, "fp16_opt_level": "O2", "sharding_parallel_size": 4}
BASE |= {
    "recompute_granularity": "selective",
    "hybrid_parallel_topo_order": "pp_first",
    "per_device_train_batch_size": 1,
}
BASE |= {"gradient_accumulation_steps": 8}
NONE, MLP, FULL = Recompute.NONE, Recompute.SUBLAYER, Recompute.FULL


def read(model: ModelShape = DENSE, **changed):
    return read_recipe({name: value for name, value in (BASE | changed).items() if value is not ...}, model)


@pytest.mark.parametrize(
    ("changed", "recomputes"),
    [
        pytest.param({}, [NONE] * 8, id="none"),
        pytest.param({"recompute_modules": {"mlp": [0, 7]}}, [MLP, *[NONE] * 6, MLP], id="a list"),
        pytest.param({"recompute_modules": ["mlp"]}, [MLP] * 8, id="names alone"),
        pytest.param(
            {"recompute_modules": {"mlp": 1}, "recompute_method": "block", "pipeline_model_parallel_size": 2},
            [MLP, NONE, NONE, NONE] * 2,
            id="a count of each stage",
        ),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            [FULL] * 8,
            id="whole layers",
        ),
        pytest.param({"recompute_granularity": "full"}, [NONE] * 8, id="full without a method"),
        pytest.param({"recompute_granularity": None, "recompute_modules": {"mlp": "all"}}, [NONE] * 8, id="modules"),
    ],
)
def test_each_layer_recomputes_as_in_paddlefleet(changed, recomputes):
    assert [layer.recompute for layer in read(**changed).plan.layers] == recomputes


def test_empty_layers_shorten_the_first_and_the_last_part():
    parts = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2, HEAD: 1, TAIL: 1}
    plan = read(replace(DENSE, layers=10), **parts, gradient_accumulation_steps=6).plan
    assert (plan.stages, plan.chunks, plan.world_size) == ((1, 2, 2, 2, 2, 1), 2, 12)


@pytest.mark.parametrize(
    ("sharding", "dp_type", "summed"),
    [("", "ddp", True), ("stage1", "zero2", True), ("stage2", "zero2", False), ("stage3", "zero3", True)],
)
def test_sharding(sharding, dp_type, summed):
    plan = read_recipe(BASE | {"sharding": sharding}, DENSE, 4).plan
    assert plan.layers[0].dp_type == DataParallel(dp_type) and plan.assumed.async_grad_reduce is summed


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        pytest.param({"recompute_modules": {"mlp": []}}, "selects no layer", id="an empty list"),
        pytest.param({"recompute_granularity": "full"}, "recomputes nothing", id="full without a method"),
        pytest.param({"recompute_granularity": ..., "recompute_modules": ["mlp"]}, "mlp has no effect", id="modules"),
        pytest.param({"recompute_modules": {"norm": "all"}}, "row statistics alone", id="a norm"),
        pytest.param({"recompute_modules": {"core_attn": [3]}}, "sums of attention", id="flash attention"),
        pytest.param({"recompute_modules": {"lm_head": "all"}}, "does not recompute it", id="the head"),
        pytest.param({"recompute_modules": {"mpl": [3]}}, "did you mean mlp?", id="a misspelt module"),
        pytest.param(
            {"recompute_modules": {"mlp": 2}, "recompute_method": "first_n", "gradient_accumulation_steps": 8}
            | {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
            "first_n loses layers",
            id="first_n with chunks",
        ),
        pytest.param(
            {"recompute_modules": {"mlp": 1}, "recompute_method": "block", "pipeline_model_parallel_size": 3}
            | {"num_empty_layers_add_in_head": 1},
            "includes the empty ones in front",
            id="a count behind an empty layer",
        ),
        pytest.param({"tensor_model_parallel_siz": 2}, "did you mean tensor_model_parallel_size?", id="misspelt"),
        pytest.param({"learning_rate": 1e-4}, "not part of a plan: learning_rate", id="a field of no plan"),
        pytest.param({"expert_model_parallel_size": 4}, "4 has no effect", id="ep of a dense model"),
        pytest.param({"device": "xpu"}, "no prices", id="another device"),
        pytest.param({"gradient_accumulation_steps": 1}, "whole gradients", id="stage1 with one micro-batch"),
        pytest.param(
            {"hybrid_parallel_topo_order": ..., "pipeline_model_parallel_size": 2},
            "as pp_first",
            id="the default order",
        ),
    ],
)
def test_surprises_are_noted(changed, note):
    assert note in "\n".join(read(**changed).notes)


REFUSED = [
    pytest.param({"stage": "VL-SFT"}, DENSE, ["stage"], id="a task"),
    pytest.param({"optim": "muon", "use_dualpipev": True}, DENSE, ["optim", "use_dualpipev"], id="two fields at once"),
    pytest.param({"num_nextn_predict_layers": 1}, DENSE, ["num_nextn_predict_layers"], id="MTP"),
    pytest.param({"num_nextn_predict_layers": 2}, WITH_MTP, ["num_nextn_predict_layers"], id="two MTP layers"),
    pytest.param({"num_nextn_predict_layers": -1}, WITH_MTP, ["num_nextn_predict_layers"], id="fewer than none"),
    pytest.param(
        TAIL_3 | {"separate_mtp_headloss": True, TAIL: 2}, WITH_MTP, ["separate_mtp_headloss"], id="MTP's head"
    ),
    pytest.param(
        TAIL_3 | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        WITH_MTP,
        ["recompute_method"],
        id="MTP behind a count of layers",
    ),
    pytest.param({"pipeline_model_parallel_size": 3}, DENSE, ["pipeline_model_parallel_size"], id="stages"),
    pytest.param(
        {"pipeline_model_parallel_size": 4, "num_empty_layers_add_in_tail": 4, "num_hidden_layers": 8},
        DENSE,
        ["num_empty_layers_add_in_tail"],
        id="a stage without layers",
    ),
    pytest.param({"num_hidden_layers": 6}, DENSE, ["num_hidden_layers"], id="another number of layers"),
    pytest.param({"global_batch_size": 9}, DENSE, ["global_batch_size"], id="a batch that contradicts"),
    pytest.param({"recompute_modules": {"mlp": [8]}}, DENSE, ["recompute_modules.mlp"], id="a layer beyond the model"),
    pytest.param({"recompute_modules": {"moe_act": "all"}}, EXPERTS, ["recompute_modules.moe_act"], id="a module"),
    pytest.param({"recompute_modules": {"flash_attn": []}}, DENSE, ["recompute_modules.flash_attn"], id="refined"),
    pytest.param(
        {"recompute_modules": {"core_attn": "all"}, "_attn_implementation": "eager"},
        DENSE,
        ["recompute_modules.core_attn"],
        id="plain attention",
    ),
    pytest.param({"fp16_opt_level": ...}, DENSE, ["fp16_opt_level"], id="fp32 weights"),
    pytest.param({"sharding_parallel_size": ...}, DENSE, ["world_size"], id="an unknown number of ranks"),
    pytest.param(
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
        EXPERTS,
        ["expert_model_parallel_size"],
        id="fewer ranks of experts than of tensor parallelism",
    ),
    pytest.param(
        {"expert_model_parallel_size": 8, "sharding": ""}, EXPERTS, ["sharding_parallel_size"], id="unsharded experts"
    ),
    pytest.param(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        DENSE,
        ["virtual_pipeline_model_parallel_size"],
        id="chunks of two stages",
    ),
    pytest.param({"context_parallel_size": 3}, DENSE, ["context_parallel_size"], id="context parallelism"),
    pytest.param({"ernie_model_config": {"sharding": ""}, "sharding": "stage1"}, DENSE, ["sharding"], id="two values"),
    pytest.param({"tensor_model_parallel_size": "two"}, DENSE, ["tensor_model_parallel_size"], id="a word"),
]


@pytest.mark.parametrize(("changed", "model", "fields"), REFUSED)
def test_every_refusal_names_its_field(changed, model, fields):
    with pytest.raises(UserError) as caught:
        read(model, **changed)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == fields


def test_an_mtp_layer_is_the_last_layer_of_the_plan():
    modules = {"recompute_modules": {"mlp": [0, 61], "moe_gate_up": "all"}}
    recipe = read(WITH_MTP, **TAIL_3, **modules, expert_model_parallel_size=4)
    assert recipe.plan.stages == (16, 16, 16, 14) and recipe.model.mtp_layers == 1
    recomputes = [layer.recompute for layer in recipe.plan.layers]
    assert recomputes == [MLP, NONE, NONE, *[Recompute.GATE_UP] * 58, MLP]
    notes = "\n".join(recipe.notes)
    assert "mtp_loss_scaling_factor: 0.1 is no part" in notes and "enable_mtp_magic_send: is off" in notes


def test_layers_with_experts_have_expert_parallelism_and_states_are_in_host_memory():
    recipe = read(EXPERTS, expert_model_parallel_size=4, tensorwise_offload_optimizer=True)
    assert [layer.ep for layer in recipe.plan.layers] == [1, *[4] * 7]
    assert recipe.asked == {"task": "pretrain", "offload_optimizer": True} and recipe.plan.assumed.offload_optimizer


def test_inputs_of_layers_that_recompute_all_are_in_host_memory():
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    rule = {"type": "mod", "value": [2, 0]}
    recipe = read(EXPERTS, expert_model_parallel_size=4, **full, decoderlayer_act_offload_settings=rule)
    assert [layer.offload for layer in recipe.plan.layers] == [100, 0, 100, 0, 0, 0, 0, 0]
    assert any("decoderlayer_act_offload_settings: has no effect" in note for note in recipe.notes)


def test_a_search_gets_the_job_and_training_its_degrees():
    content = BASE | {"stage": "DPO", "fine_tuning": "lora", "model_name_or_path": "Qwen/Qwen3-0.6B-Base"}
    known = ["model_size", "seq_length", "mixed_precision", "task", "lora_rank", "trainer", "learning_rate"]
    options, notes = options_of(content | {"learning_rate": 1}, known)
    job = {
        "model_size": "Qwen/Qwen3-0.6B-Base",
        "seq_length": 4096,
        "mixed_precision": "bf16",
        "task": "dpo",
        "lora_rank": 8,
    }
    assert options == job | {"trainer": "paddlefleet", "learning_rate": 1} and "left to the search" in notes[-1]
    with pytest.raises(UserError, match="from-paddlefleet"):
        options_of(content | {"recompute_modules": ["mlp"]}, [*known, "tensor_parallel_degree"])


def model_of(recipe: dict) -> ModelShape:
    """The model that a recipe names, or a stand-in for an unknown one, with its numbers of layers and experts."""
    name = str(recipe.get("model_name_or_path"))
    preset = {"Qwen3-0.6B": "qwen3-0.6b", "DeepSeek-V3": "deepseek-v3"}
    if known := next((value for key, value in preset.items() if key in name), None):
        return load_model(known)
    layers, kv_heads = (18, 2) if "0.3B" in name else (54, 8) if "300B" in name else (28, 4)
    own = recipe.get("ernie_model_config", {}).get("num_hidden_layers", layers)
    return replace(
        EXPERTS, layers=own, kv_heads=kv_heads, heads=16, experts=0 if "0.3B" in name else 64, dense_layers=()
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read_as_the_table_says(path):
    recipe = yaml.safe_load(path.read_text())
    recipe.pop("layout_of_file", None)
    model, stated = model_of(recipe), recipe.get("sharding_parallel_size")
    rows = (line.split("|") for line in TABLE.read_text().splitlines() if line.count("|") == 4)
    outcomes = {name.strip(): outcome.strip() for _, name, outcome, *_ in rows}
    try:
        world = None if stated else 8
        made = read_recipe(recipe, model, world).plan
        arguments = yaml.safe_load(yaml.safe_dump(fleet_arguments(made, model)))
        assert read_recipe(arguments, model, made.world_size).plan == made
        outcome = "read"
    except UserError as error:
        outcome = ", ".join(dict.fromkeys(fault.partition(":")[0] for fault in error.faults))
    assert outcome == outcomes[path.stem]
