"""The model by Galvatron's options."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.model_options import Model, ModelOptions
from paddlenlp_galvatron.plan import load_model

MINE = {
    "hidden_size": 1024,
    "num_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 500,
    "seq_length": 512,
}
LLAMA = {"model_size": "llama2-7b", "seq_length": 2048}
LISTS = {"num_layertype": 1, "hidden_size_list": "5120", "layernum_list": "72", "seqlen_list": "32768"}
SIZES = {"num_attention_heads": 64, "intermediate_size": 13824, "vocab_size": 32000}


def resolve(**values: Any) -> Model:
    return ModelOptions.from_mapping(values).resolve()


def test_a_preset_is_itself() -> None:
    assert resolve(**LLAMA) == Model((load_model("llama2-7b"),), 2048)


def test_numbers_of_ones_own_make_a_model() -> None:
    (shape,) = resolve(set_model_config_manually=1, **MINE).shapes
    assert (shape.layers, shape.hidden_size, shape.heads, shape.kv_heads) == (6, 1024, 8, 8)
    assert (shape.family, shape.intermediate_size, shape.vocab_size) == ("llama", 4096, 500)
    assert resolve(**MINE, num_query_groups=2).shapes[0].kv_heads == 2


def test_numbers_change_a_preset() -> None:
    (shape,) = resolve(**LLAMA, set_model_config_manually="1", hidden_size=8192, num_attention_heads=64).shapes
    assert (shape.hidden_size, shape.heads, shape.kv_heads, shape.intermediate_size) == (8192, 64, 64, 11008)
    assert shape.fingerprint != load_model("llama2-7b").fingerprint
    (short,) = resolve(**LLAMA, set_layernum_manually=1, num_hidden_layers=4).shapes
    assert (short.layers, short.hidden_size, short.name) == (4, 4096, "llama2-7b_layer4")


def test_a_flag_of_0_leaves_the_numbers_of_a_script_out_of_account() -> None:
    flags = {"set_model_config_manually": 0, "set_layernum_manually": 0, "set_seqlen_manually": 0}
    model = resolve(**{**MINE, **LLAMA}, **flags)
    assert model.shapes == (load_model("llama2-7b"),)
    assert model.seq_length == 4096, "the model's number of positions"
    assert set(model.ignored) == set(MINE)
    assert resolve(**{**MINE, **LLAMA}, **flags | {"set_seqlen_manually": 1}).seq_length == 2048


def test_a_length_set_by_hand_may_go_beyond_the_models_positions() -> None:
    model = resolve(model_size="llama2-7b", seq_length=8192, set_seqlen_manually=1)
    assert model.shapes[0].max_position_embeddings == model.seq_length == 8192
    assert model.name == "llama2-7b_seq8192"
    assert resolve(model_size="llama2-7b", seq_length=8192).shapes == (load_model("llama2-7b"),)
    for length in ({"seq_length": 8192}, {"seqlen_list": "8192"}):
        assert resolve(model_size="llama2-7b", set_seqlen_manually=1, **length).shapes == model.shapes
        numbers = {name: value for name, value in MINE.items() if name != "seq_length"}
        assert resolve(**numbers, **length).shapes[0].max_position_embeddings == 8192


def test_the_lists_of_the_other_dialect_say_one_type_of_layer() -> None:
    model = resolve(model_size="llama2-7b", hidden_size_list="4096", layer_num_list="16", seqlen_list="1024")
    assert [shape.layers for shape in model.shapes] == [16]
    assert model.seq_length == 1024
    assert model.shapes[0].seq_length is None


def test_the_lists_alone_are_the_sizes_of_one_type_as_of_two() -> None:
    """As the port's search script names them, which has no hidden_size."""
    (shape,) = resolve(**LISTS, **SIZES, layernum=72).shapes
    assert (shape.hidden_size, shape.layers, shape.heads, shape.intermediate_size) == (5120, 72, 64, 13824)
    assert resolve(**LISTS, **SIZES).seq_length == shape.max_position_embeddings == 32768
    for name in ("hidden_size_list", "layernum_list", "seqlen_list"):  # one list next to the other sizes
        sizes = {"hidden_size": 5120, "num_layers": 72, "seq_length": 32768}
        del sizes[{"hidden_size_list": "hidden_size", "layernum_list": "num_layers"}.get(name, "seq_length")]
        assert resolve(**SIZES, **sizes, **{name: LISTS[name]}).shapes == (shape,)
    two = {"hidden_size_list": "5120,2560", "layernum_list": "36,36", "num_layertype": 2, "seqlen_list": "32768,1024"}
    wide, narrow = resolve(**two, **SIZES, layernum=72).shapes
    assert (wide.hidden_size, wide.heads, wide.layers) == (5120, 64, 36)
    assert (narrow.hidden_size, narrow.heads, narrow.intermediate_size, narrow.seq_length) == (2560, 32, 6912, 1024)


def test_several_types_of_layers_are_several_shapes() -> None:
    model = resolve(model_size="llama2-7b", hidden_size_list=[4096, 2048], layernum_list="8,16", seqlen_list="1024,512")
    wide, narrow = model.shapes
    assert (wide.layers, wide.hidden_size, wide.heads, wide.seq_length) == (8, 4096, 32, None)
    assert (narrow.layers, narrow.hidden_size, narrow.heads, narrow.seq_length) == (16, 2048, 16, 512)
    assert narrow.intermediate_size == 11008 // 2
    assert model.seq_length == 1024
    assert model.name == "llama2-7b_layer8-16"


def test_the_names_of_hubs_are_those_of_presets() -> None:
    for name, preset in (
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-2-7b-chat", "llama2-7b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("facebook/llama-13b", "llama-13b"),
        ("Qwen/Qwen2-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
    ):
        assert load_model(name) == load_model(preset)
    with pytest.raises(UserError, match="neither a preset"):
        load_model("Qwen/Qwen9-7B")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model_size: missing; name a preset such as qwen2.5-7b"),
        ({"model_size": "llama2-7b"}, "seq_length: missing.*set_seqlen_manually 0 for the 4096"),
        ({**LLAMA, "set_layernum_manually": 1}, "num_layers is missing"),
        ({"model_size": "llama2-7b", "set_seqlen_manually": 1}, "seq_length is missing"),
        ({**LLAMA, "set_model_config_manually": 1}, "no number is given"),
        (
            {"hidden_size": 64, "seq_length": 8},
            "or give num_layers, num_attention_heads, intermediate_size, vocab_size$",
        ),
        (LISTS, "model_size: missing; .* or give num_attention_heads, intermediate_size, vocab_size$"),
        ({**LISTS, **SIZES, "layernum": 71}, "layernum_list: 72 layers, but num_layers is 71"),
        ({**LISTS, **SIZES, "hidden_size": 4096}, "hidden_size_list: 5120, but .* has hidden size 4096; make them"),
        ({**MINE, "num_attention_heads": 7}, "hidden_size 1024 does not split into 7 heads"),
        ({**MINE, "model_type": "gpt"}, "model_type is 'gpt'"),
        ({**LLAMA, "hidden_size_list": "5120"}, "hidden_size_list: 5120, but llama2-7b has hidden size 4096"),
        ({**LLAMA, "num_layertype": 2, "layernum_list": "4"}, "layernum_list: has 1 entries for 2 types"),
        ({**LLAMA, "hidden_size_list": "4096,2048"}, "layernum_list: missing"),
        ({**LLAMA, "hidden_size_list": "4096,2049", "layernum_list": "1,1"}, "choose a multiple of 128"),
        ({**LLAMA, "layernum_list": "4", "num_layers": 8}, "layernum_list: 4 layers, but num_layers is 8"),
        ({**LLAMA, "num_layers": 10**6}, "num_layers: must be at most 10000"),
        ({**LLAMA, "layernum_list": "4,x"}, r"layernum_list: must be a whole number"),
        ({**LLAMA, "seqlen_list": "1024"}, "seqlen_list: starts with 1024, but seq_length is 2048"),
        ({"model_size": "llama9"}, "llama9: neither a preset nor a config.json"),
        ({"layer_numlist": 1}, "layer_numlist: unknown option; did you mean layer_num_list"),
    ],
)
def test_a_mistake_is_reported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(**values)


@given(
    st.dictionaries(
        st.sampled_from(sorted(ModelOptions.model_fields)),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8), st.booleans(), st.lists(st.integers())),
        max_size=6,
    )
)
def test_any_values_give_a_model_or_a_clear_error(values: dict[str, Any]) -> None:
    try:
        model = resolve(**values)
    except UserError as error:
        assert all(fault.strip() and len(fault) < 600 for fault in error.faults)
    else:
        assert model.shapes and model.seq_length > 0
