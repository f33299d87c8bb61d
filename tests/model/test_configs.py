"""A config.json means the same as in transformers 5, also where fields are absent or double, or is refused by field."""

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meanings import (
    ALSO_NULL,
    FULL,
    LLAMA3,
    SIZES,
    WHOLE,
    differences,
    meaning,
    random_config,
    recorded,
    single_changes,
)
from plans import json_values

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model import TRAINED, config_of, load_model, preset_names, shape_from_config
from paddlenlp_galvatron.model.unsupported import PLAIN

LLAMA = WHOLE["llama"] | {"rope_scaling": None}
families = st.sampled_from(list(TRAINED))


def test_a_field_that_is_missing_or_null_means_what_transformers_says() -> None:
    wrong = {}
    stated = recorded()
    for name, config in single_changes().items():
        ours, theirs, field = meaning(config), stated[name], name.rpartition(" ")[2]
        if theirs is None:
            agrees = ours is None or ("null" in name and field in ALSO_NULL)
        else:
            agrees = not differences(ours, theirs) if ours else field in SIZES
        if not agrees:
            wrong[name] = (ours, theirs)
    assert not wrong
    assert sum(meaning is not None for meaning in stated.values()) > 150


def test_what_is_written_is_what_was_read() -> None:
    for name in preset_names():
        shape = load_model(name)
        assert shape_from_config(config_of(shape), name) == shape
    for config in single_changes().values():
        with suppress(UserError):
            shape = shape_from_config(config, "")
            assert shape_from_config(config_of(shape), "") == shape


PLACES = ("rope_theta", "rope_scaling", "rope_parameters")


@given(
    families,
    st.dictionaries(st.sampled_from(PLACES), st.sampled_from((1e4, 5e5, 1000000))),
    st.sampled_from(({}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": "default", "type": "default"})),
)
def test_a_base_of_rotary_positions_is_found_in_every_place(
    family: str, bases: dict[str, float], kind: dict[str, str]
) -> None:
    config = {name: value for name, value in WHOLE[family].items() if name not in PLACES}
    stated = {place: base if place == "rope_theta" else kind | {"rope_theta": base} for place, base in bases.items()}
    if len(set(bases.values())) > 1:
        with pytest.raises(UserError, match=r"rope_.* differ|rope_theta is .*, but .* in rope_.*; keep one"):
            shape_from_config(config | stated, "")
    else:
        usual = {"mixtral": 1e6, "ernie4_5": 5e5, "ernie4_5_moe": 5e5}.get(family, 1e4)
        assert shape_from_config(config | stated, "").rope_theta == next(iter(bases.values()), usual)


words = st.sampled_from(("default", "llama3", "linear"))


@given(
    families,
    st.sampled_from(PLACES),
    json_values | words | st.dictionaries(st.sampled_from((*LLAMA3, "type", "rope_theta")), json_values | words),
)
def test_any_value_of_positions_is_taken_whole_or_refused_by_its_field(family: str, place: str, value: Any) -> None:
    try:
        shape = shape_from_config(WHOLE[family] | {place: value}, "")
    except UserError as error:
        assert all("rope" in fault for fault in error.faults)
    else:
        assert shape_from_config(config_of(shape), "") == shape


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_the_numbers_of_scaled_positions_may_stand_beside_them(place: str) -> None:
    scaled = shape_from_config(LLAMA | {"rope_scaling": LLAMA3}, "")
    without = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    assert shape_from_config(LLAMA | {place: LLAMA3}, "") == scaled
    assert shape_from_config(LLAMA | {place: without, "original_max_position_embeddings": 32}, "") == scaled
    assert dict(shape_from_config(LLAMA | {place: without}, "").rope_scaling) == LLAMA3 | {
        "original_max_position_embeddings": LLAMA["max_position_embeddings"]
    }


@pytest.mark.parametrize(
    ("changed", "stated"),
    [
        ({"rope_theta": None}, "rope_theta is null"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is 50000.0, but null in rope_parameters; keep one"),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "default"}}, "are two names of one thing but differ"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_scaling: type linear does not go with"),
        ({"rope_scaling": {"type": "default", "factor": 8}}, "rope_scaling: factor 8 does not go with rope_type def"),
        ({"rope_scaling": {"rope_type": None}}, 'rope_scaling is {"rope_type": null}; plain rotary embeddings and'),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling: factor is null; give a positive number"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "rope_scaling: beta_fast 32 does not go with rope_type llama3"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 8}, "_embeddings is 8, but 32 in rope_scaling"),
        ({"rope_scaling": ["llama3"]}, 'rope_scaling is ["llama3"]; plain'),
        ({"rope_scaling": "default"}, "rope_scaling is default; plain"),
        ({"hidden_size": 96, "head_dim": None}, "head_dim 3 is odd, but rotary positions turn pairs of numbers"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, 'rope_scaling is {"rope_type": ["llama3"]}; plain'),
    ],
)
def test_positions_that_contradict_themselves_are_refused_by_field(changed: dict[str, Any], stated: str) -> None:
    with pytest.raises(UserError) as error:
        shape_from_config(LLAMA | changed, "", source="config.json")
    assert str(error.value).startswith("config.json: ") and stated in str(error.value)


REFUSED: dict[str, Any] = {
    **dict.fromkeys(("alibi", "use_alibi", "use_long_sequence_strategies", "use_parallel_residual"), True),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "embd_pdrop", "mlp_dropout", "attn_pdrop"), 0.1),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), 30.0),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 2),
    **dict.fromkeys(("attention_multiplier", "partial_rotary_factor", "rope_scaling_factor"), 0.5),
    **{name: {"quant_method": "fp8"} for name in ("quantization_config", "quantization", "compression_config")},
    **dict.fromkeys(("pretraining_tp", "num_nextn_predict_layers", "routed_scaling_factor"), 2),
    **{"rope_scaling_type": "linear", "position_embedding_type": "alibi", "weight_quantize_algo": "nf4"},
    **{"per_layer_config": {"0": {"head_dim": 4}}, "rotary_emb_base": 1e6, "use_bias": True, "is_causal": False},
    **{"layer_types": ["full_attention", "chunked_attention"], "hidden_act": "relu", "scoring_func": "sigmoid"},
}
PLAINLY: dict[str, Any] = {  # present, and without effect
    **dict.fromkeys(("alibi", "rope_scaling_type", "quantization_config", "mlp_layer_types"), None),
    **dict.fromkeys(("alibi", "use_bias", "use_parallel_residual", "use_long_sequence_strategies"), False),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "logits_scaling", "residual_multiplier"), 1.0),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "num_nextn_predict_layers", "router_jitter_noise"), 0),
    **{"hidden_act": "swish", "layer_types": FULL, "classifier_dropout": 0.1, "use_fused_dropout_add": True},
    **{"position_embedding_type": "rope", "per_layer_config": {}, "summary_first_dropout": 0.1, "a_field": [7]},
    "quantization_config": {"weight_quantize_algo": None, "quant_type": None, "quant_method": None, "shift": False},
}


@pytest.mark.parametrize("family", list(TRAINED))
def test_what_the_layers_do_not_compute_is_refused_by_field(family: str) -> None:
    plain = shape_from_config(WHOLE[family], "")
    switches = plain.traits.switches.values()
    plainly = PLAINLY | {"partial_rotary_factor": plain.traits.rotary_share, "use_bias": "use_bias" in switches}
    assert shape_from_config(WHOLE[family] | plainly, "") == plain
    for field, value in REFUSED.items():
        if field in switches:
            continue
        if field in WHOLE[family] and TRAINED[family].mixture and TRAINED[family].mixture.grouped:
            value = "tanh" if field == "scoring_func" else -1
        with pytest.raises(UserError, match=f"^config: {field}( is |: the weights are quantised)"):
            shape_from_config(WHOLE[family] | {field: value}, "")


@given(families, st.sampled_from([name for _, names in PLAIN for name in names.split()]), st.text("ab_"), json_values)
def test_a_field_of_the_list_asks_for_nothing_or_is_refused(family: str, name: str, any: str, value: Any) -> None:
    changed = WHOLE[family] | {name.replace("*", any): value}
    with suppress(UserError):
        assert shape_from_config(changed, "") == shape_from_config(WHOLE[family], "")


@given(st.integers())
def test_any_change_is_taken_whole_or_refused_by_its_field(seed: int) -> None:
    config = random_config(Random(seed))
    try:
        shape = shape_from_config(config, "", source="config.json")
    except UserError as error:
        assert all(line.startswith("config.json: ") for line in error.faults) and len(error.faults) <= 2
    else:
        assert shape_from_config(config_of(shape), "") == shape


ALTERNATE = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}


@pytest.mark.parametrize(
    ("family", "changed", "windows"),  # of both layers; -1: linear attention; text: the refusal
    [
        pytest.param("qwen2", {"use_sliding_window": True, "layer_types": None}, [0, 32], id="from layer 1 on"),
        pytest.param("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, [0, 0], id="from layer 2 on"),
        pytest.param("qwen2_moe", ALTERNATE, [32, 0], id="every other layer"),
        pytest.param("qwen3_moe", {"use_sliding_window": True}, [32, 32], id="all layers"),
        pytest.param("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4096}, [0, 0], id="off"),
        pytest.param("mixtral", {"sliding_window": 8}, [8, 8], id="Mixtral"),
        pytest.param("llama", {"sliding_window": 8}, "sliding_window asks for attention to a window", id="Llama"),
        pytest.param("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .*use_sliding", id="listed"),
        pytest.param("gpt_oss", {"layer_types": FULL, "sliding_window": None}, [0, 0], id="full by the list"),
        pytest.param("gpt_oss", {"sliding_window": None}, [0, 0], id="no window"),
        pytest.param("gemma3_text", {"sliding_window_pattern": 1}, [0, 0], id="a period of one"),
        pytest.param("gemma3_text", {"sliding_window": 0}, "sliding_window is 0; give a whole", id="no size"),
        pytest.param("qwen3_next", {}, [-1, 0], id="linear attention"),
        pytest.param("qwen3_next", {"linear_num_value_heads": 3}, "give a multiple of linear_num_key", id="heads"),
    ],
)
def test_layers_attend_as_config_json_says(family: str, changed: dict[str, Any], windows: list[int] | str) -> None:
    if isinstance(windows, str):
        with pytest.raises(UserError, match=windows):
            shape_from_config(WHOLE[family] | changed, "")
        return
    shape = shape_from_config(WHOLE[family] | changed, "x")
    assert [-1 if kind.linear else kind.window for kind in map(shape.of, range(2))] == windows
    if any(windows):
        with pytest.raises(UserError, match=r"^model x: the layers that training builds on PaddleNLP lack "):
            shape.trained()


def test_attention_to_windows_is_priced_by_the_pairs_that_it_sees() -> None:
    full, window = shape_from_config(WHOLE["gpt_oss"], "").kinds[::-1]
    assert window.window == 16 and full.pairs(64) == 32 and full.pairs(64, causal=False) == 64
    seen = sum(min(place + 1, 16) for place in range(4096)) / 4096
    assert window.pairs(4096) == pytest.approx(seen, abs=0.5) and window.pairs(8) == full.pairs(8)
    linear = shape_from_config(WHOLE["qwen3_next"], "").kinds[0]
    assert linear.core_flops(64) == linear.core_flops(4096) > 0
