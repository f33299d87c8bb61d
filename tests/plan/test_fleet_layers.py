"""PaddleFleet's rules of layers: results of its own code (data in ../shared), and properties."""

from __future__ import annotations

import pytest
from fleet import named
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan.fleet_layers import OF_THE_MODEL, division, offloaded, selected


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
