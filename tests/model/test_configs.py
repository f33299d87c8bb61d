"""A config.json means the same as in transformers 5, also where fields are absent or double, or is refused by field."""

from __future__ import annotations

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
from paddlenlp_galvatron.model import FAMILIES, config_of, load_model, preset_names, shape_from_config
from paddlenlp_galvatron.model.unsupported import PLAIN

LLAMA = WHOLE["llama"] | {"rope_scaling": None}
families = st.sampled_from(list(FAMILIES))


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
    **{"layer_types": ["full_attention", "sliding_attention"], "hidden_act": "relu", "scoring_func": "sigmoid"},
}
PLAINLY: dict[str, Any] = {  # present, and without effect
    **dict.fromkeys(("alibi", "rope_scaling_type", "quantization_config", "layer_types", "mlp_layer_types"), None),
    **dict.fromkeys(("alibi", "use_bias", "use_parallel_residual", "use_long_sequence_strategies"), False),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "logits_scaling", "residual_multiplier"), 1.0),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "num_nextn_predict_layers", "router_jitter_noise"), 0),
    **{"hidden_act": "swish", "layer_types": FULL, "classifier_dropout": 0.1, "use_fused_dropout_add": True},
    **{"position_embedding_type": "rope", "per_layer_config": {}, "summary_first_dropout": 0.1, "a_field": [7]},
    "quantization_config": {"weight_quantize_algo": None, "quant_type": None, "quant_method": None, "shift": False},
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_the_layers_do_not_compute_is_refused_by_field(family: str) -> None:
    plain = shape_from_config(WHOLE[family], "")
    plainly = PLAINLY | {"partial_rotary_factor": FAMILIES[family].rotary_share}
    assert shape_from_config(WHOLE[family] | plainly, "") == plain
    for field, value in REFUSED.items():
        if field in WHOLE[family] and FAMILIES[family].mixture and FAMILIES[family].mixture.grouped:
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


@pytest.mark.parametrize(
    ("family", "changed", "taken"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, False),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, True),  # from layer 2 on, which it has not
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2}, False),
        ("qwen3_moe", {"use_sliding_window": True}, False),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4096}, True),
        ("mixtral", {"sliding_window": 4096}, False),
        ("mixtral", {"sliding_window": None}, True),
        ("llama", {"sliding_window": 4096}, False),
    ],
)
def test_windows_that_matter_are_refused(family: str, changed: dict[str, Any], taken: bool) -> None:
    if taken:
        assert shape_from_config(WHOLE[family] | changed, "") == shape_from_config(WHOLE[family], "")
    else:
        with pytest.raises(UserError, match="sliding_window asks for attention to a window alone"):
            shape_from_config(WHOLE[family] | changed, "")
