"""The model's shape, from presets and config files."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import MODEL, json_values
from small_model import GROUPED_MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model import config_of, joint_fingerprint, preset_names, shape_from_config
from paddlenlp_galvatron.model.shape import flops_per_token
from paddlenlp_galvatron.plan import load_model

SIZES = tomllib.loads(Path(__file__).with_name("published_sizes.toml").read_text())
# Billions: MTP's layer, and all with the tables that it has in checkpoints, as Hugging Face counts.
MTP_SIZES = {"deepseek-v3": (11.610, 684.490), "glm-4.5": (3.988, 358.338), "glm-4.5-air": (2.375, 110.469)}
CONFIG = GROUPED_MODEL | {"num_hidden_layers": 4, "vocab_size": 1001, "max_position_embeddings": 128}


@pytest.mark.parametrize("name", MTP_SIZES)
def test_mtp_is_one_more_layer_as_published(name):
    plain = load_model(name)
    shape = plain.having(plain.layers, 1)
    tables = 2 * shape.vocab_size * shape.hidden_size
    sizes = shape.parameters - plain.parameters, shape.parameters + tables
    assert [size / 1e9 for size in sizes] == pytest.approx(MTP_SIZES[name], abs=5e-4)
    assert [kind.layers for kind in shape.kinds] == [*(kind.layers for kind in plain.kinds), 1]
    uses = shape.active_parameters - plain.active_parameters + tables // 2  # the LM head is used again
    pairs = 6 * (shape.q_width + shape.context_width) * 4096
    assert flops_per_token(shape, 4096) - flops_per_token(plain, 4096) == pytest.approx(6 * uses + pairs)
    config = config_of(shape)
    assert shape_from_config(config, shape.name) == shape
    assert shape_from_config(config | {"num_nextn_predict_layers": 0}, shape.name) == plain
    for wrong in ({"num_nextn_predict_layers": 2}, {"num_mtp_layers": 0}):
        with pytest.raises(UserError, match="num_nextn_predict_layers"):
            shape_from_config(config | wrong, shape.name)


def test_every_preset_has_the_published_size():
    assert set(preset_names()) == set(SIZES["weights"])
    for name, billions in SIZES["weights"].items():
        model = load_model(name)
        assert model.name == name
        assert model.parameters / 1e9 == pytest.approx(billions, rel=0.001 if round(billions, 3) == billions else 1e-13)


def test_of_experts_only_the_chosen_ones_are_active():
    for name, billions in SIZES["active"].items():
        assert load_model(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.002)


ERNIE = {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 0}
MIXTURE = CONFIG | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def test_a_config_of_experts_is_read_and_written_alike():
    shape = shape_from_config(MIXTURE, "small")
    assert (shape.experts, shape.experts_per_token, shape.expert_size, shape.norm_topk) == (6, 2, 8, False)
    assert shape_from_config(config_of(shape), "small") == shape
    balanced = shape_from_config(MIXTURE | {"output_router_logits": True, "router_aux_loss_coef": 0.02}, "small")
    assert balanced.router_aux_loss_coef == 0.02 and shape.router_aux_loss_coef == 0  # unless it is requested
    assert shape_from_config(config_of(balanced), "small") == balanced and balanced.fingerprint == shape.fingerprint
    local = {name: value for name, value in MIXTURE.items() if name != "num_experts"} | {"num_local_experts": 6}
    assert shape_from_config(local, "small") == shape  # as transformers 5 writes it
    names = [weight.name for weight in shape.layer.weights]
    assert (
        "mlp.gate.weight" in names and "mlp.experts.5.down_proj.weight" in names and "mlp.up_proj.weight" not in names
    )
    assert load_model("mixtral-8x7b").layer["block_sparse_moe.experts.7.w2.weight"].shape == (14336, 4096)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_experts": None}, "num_experts is null"),
        ({"num_local_experts": 4}, "num_experts and num_local_experts are two names"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        ({"model_type": "glm4_moe", "n_routed_experts": 6}, "num_experts is 6; 0 alone is supported"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; give a whole number from 1"),
        ({"decoder_sparse_step": 8}, "leave none of 4 layers with experts"),
        (ERNIE | {"moe_layer_interval": 5}, "leave none of 4 layers with experts"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers is [-1]; give a list of numbers of layers"),
        ({"model_type": "mixtral", "mlp_only_layers": [0]}, "mlp_only_layers is [0]; [] alone is supported"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; 0 alone is supported"),
        (ERNIE | {"moe_num_experts": [6, 6]}, "moe_num_experts is [6, 6]; give a whole number"),  # one a modality
        (ERNIE | {"vision_config": {"depth": 2}}, 'vision_config is {"depth": 2}; null alone is supported'),
        (ERNIE | {"num_experts": 4}, "moe_num_experts and num_experts are two names of one number"),
        (ERNIE | {"moe_norm_min": 1e-6}, "moe_norm_min is 1e-06; 1e-12 alone is supported"),
        (ERNIE | {"output_router_logits": True}, "output_router_logits is true; false alone is supported"),
    ],
)
def test_what_no_plan_has_of_experts_is_refused_by_field(changed, named):
    with pytest.raises(UserError) as error:
        shape_from_config(MIXTURE | changed, "small", source="config.json")
    assert named in str(error.value)


@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=4))
def test_layers_without_experts_are_those_of_transformers(layers, step, listed):
    config = MIXTURE | {"num_hidden_layers": layers, "decoder_sparse_step": step, "mlp_only_layers": listed}
    # Qwen3MoeDecoderLayer of transformers 5.24.
    sparse = [index for index in range(layers) if index not in listed and (index + 1) % step == 0]
    if not sparse:
        with pytest.raises(UserError, match="leave none"):
            shape_from_config(config, "small")
        return
    shape = shape_from_config(config, "small")
    assert [index for index in range(layers) if shape.of(index).experts] == sparse
    assert shape.layers_with_experts == len(sparse)
    assert shape_from_config(config_of(shape), "small") == shape
    assert sum(kind.layers for kind in shape.kinds) == layers
    assert shape.of(0) == shape.kinds[0] and all(not kind.dense_layers for kind in shape.kinds)
    dense = CONFIG | {"model_type": "qwen3", "head_dim": 8, "num_hidden_layers": layers - len(sparse)}
    alone = MIXTURE | {"num_hidden_layers": len(sparse)}
    parts = [shape_from_config(of, "part") for of in (dense, alone) if of["num_hidden_layers"]]
    of_layers = sum(part.layers * part.layer.parameters for part in parts)
    assert shape.parameters - of_layers == parts[-1].parameters - parts[-1].layers * parts[-1].layer.parameters
    idle = len(sparse) * 3 * (6 - 2) * 8 * shape.hidden_size
    assert shape.parameters - shape.active_parameters == idle
    assert (shape.fingerprint == replace(shape, dense_layers=()).fingerprint) is (not shape.dense_layers)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(-1, 12), st.integers(1, 4))
def test_intervals_of_layers_with_experts_are_those_of_transformers(layers, first, last, step):
    fields = {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step}
    config = MIXTURE | ERNIE | fields | {"num_hidden_layers": layers}
    end = layers - 1 if last == -1 else last  # Ernie4_5_MoeDecoderLayer of transformers 5.24
    sparse = [index for index in range(layers) if (index + 1) % step == 0 and first <= index <= end]
    assume(sparse)
    shape = shape_from_config(config, "small")
    assert [index for index in range(layers) if shape.of(index).experts] == sparse
    assert shape_from_config(config_of(shape), "small") == shape


KIMI = config_of(load_model("kimi-k2")) | {"model_type": "kimi_k2", "torch_dtype": "bfloat16", "eos_token_id": 1}


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (KIMI, ["the nearest is deepseek_v3; if its layers are the same, write this as model_type"]),
        (
            CONFIG | {"model_type": "mistral", "sliding_window": 8},
            ["the nearest is llama, but:", "sliding_window asks"],
        ),
        (
            KIMI | {"text_config": {"new_size": 3}},
            ["the nearest is deepseek_v3, but:", "new_size: no family here reads"],
        ),
        (
            MIXTURE | ERNIE | {"model_type": "ernie5", "moe_k": None, "num_experts_per_tok": None},
            ["is ernie4_5_moe, but:", "moe_k is null; give a whole"],
        ),
    ],
)
def test_an_unknown_family_is_compared_with_the_nearest_one(config, lines):
    with pytest.raises(UserError) as error:
        shape_from_config(config, "small", source="config.json")
    first, *others = error.value.faults
    assert first.startswith("config.json: model_type is ") and len(others) == len(lines)
    assert all(line in stated for line, stated in zip(lines, others, strict=True))


def test_a_config_is_read_by_file_and_by_folder(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert load_model(folder) == load_model(folder / "config.json") == MODEL
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    assert load_model(tmp_path / "other.json") == replace(MODEL, name="other")


def test_the_fingerprint_leaves_out_what_no_plan_depends_on():
    assert replace(MODEL, name="other").fingerprint == MODEL.fingerprint
    assert replace(MODEL, initializer_range=0.1).fingerprint == MODEL.fingerprint  # of the first weights alone
    assert replace(MODEL, kv_heads=8).fingerprint != MODEL.fingerprint
    assert replace(MODEL, seq_length=8).fingerprint != MODEL.fingerprint


def test_the_fingerprint_of_several_layer_types_reports_them_all():
    other = replace(MODEL, hidden_size=2 * MODEL.hidden_size)
    assert joint_fingerprint([MODEL]) == MODEL.fingerprint
    assert len({joint_fingerprint(models) for models in ([MODEL], [MODEL, other], [other, MODEL])}) == 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden_size": None}, "hidden_size is null; give a whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'; give a whole number from 1 to"),
        ({"hidden_size": 60}, "hidden_size 60 does not split into 8 heads"),
        ({"num_key_value_heads": 3}, "8 is no multiple of 3 kv heads"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; give true or false"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: llama, qwen2, qwen3, ernie4_5, ernie4_5_moe"),
    ],
)
def test_a_bad_config_is_refused_by_field(changed, named):
    with pytest.raises(UserError) as error:
        shape_from_config(CONFIG | changed, "small", source="config.json")
    assert str(error.value).startswith("config.json: ") and named in str(error.value)


def test_an_unknown_model_names_the_nearest_one():
    with pytest.raises(UserError, match=r"model llama9: neither .*; did you mean llama-7b"):
        load_model("llama9")
    with pytest.raises(UserError, match="no such file"):
        load_model("nothing.json")


@given(json_values)
def test_other_json_is_a_user_error(value):
    with pytest.raises(UserError):
        shape_from_config(value, "small")
