"""The newest plan of a folder that fits model and cluster is taken, and each other is reported with the reason."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from plans import MODEL, plan_fields

import paddlenlp_galvatron.plan.file as newest
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan.file import newest_plan

RANKS = 8
OTHER = {"searched_from": {"model": "llama2-7b", "model_fingerprint": "0123456789abcdef"}}


@pytest.fixture
def put(tmp_path):
    """Writes a file into the folder, newer than all before it."""
    count = 0

    def write(name: str, content: object) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        os.utime(path, (count, count))
        return path

    return write


def test_the_newest_that_fits_is_taken(tmp_path, put):
    put("z.json", plan_fields())
    wanted = put("b.json", plan_fields(galvatron={"searched_from": {"model_fingerprint": MODEL.fingerprint}}))
    put("ranks.json", plan_fields(world_size=16))
    put("model.json", plan_fields(galvatron=OTHER))
    put("layers.json", plan_fields(pp_division="2,1"))
    put("computation_profiling_fp32.json", {"layertype_0": 1.0, "galvatron": {"world_size": RANKS}})
    put("list.json", [1, 2])
    put("cut.json", '{"pp_deg": 2, "tp_si')
    put("plan.txt", plan_fields())
    assert newest_plan(tmp_path, MODEL, RANKS) == wanted


def test_a_plan_without_a_world_size_fits_where_its_degrees_do(tmp_path, put):
    wanted = put("plan.json", plan_fields(world_size=...))
    assert newest_plan(tmp_path, MODEL, 16) == wanted
    with pytest.raises(UserError, match="does not divide the 3 ranks of a stage"):
        newest_plan(tmp_path, MODEL, 6)


def test_the_error_says_why_each_plan_does_not_fit(tmp_path, put):
    put("ranks.json", plan_fields(world_size=16))
    put("model.json", plan_fields(galvatron=OTHER))
    put("cut.json", '{"pp_deg": 2, "tp_si')
    put("profile.json", {"layertype_0": 1.0})
    with pytest.raises(UserError) as caught:
        newest_plan(tmp_path, MODEL, RANKS)
    headline, *reasons = caught.value.faults
    assert f"no plan fits {MODEL.name} on 8 ranks; run galvatron search" in headline
    assert [reason.partition(":")[0] for reason in reasons] == [
        str(tmp_path / name) for name in ("cut.json", "model.json", "ranks.json")
    ]
    assert "not valid JSON" in reasons[0] and reasons[0].count("cut.json") == 1
    assert "searched for llama2-7b" in reasons[1]
    assert "the plan is for 16 ranks but 8 are started" in reasons[2]


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_plans_is_named(tmp_path, folder):
    with pytest.raises(UserError, match=f"{folder}: no plan fits") as caught:
        newest_plan(tmp_path / folder, MODEL, RANKS)
    assert len(caught.value.faults) == 1


def test_files_older_than_the_plan_are_not_read(tmp_path, put, monkeypatch):
    for number in range(300):
        put(f"{number}.json", plan_fields(world_size=16))
    with pytest.raises(UserError, match=r"290 older files") as caught:
        newest_plan(tmp_path, MODEL, RANKS)
    assert len(caught.value.faults) == 12
    wanted = put("fits.json", plan_fields())
    monkeypatch.setattr(
        newest, "read_json", lambda path, *_, **__: json.loads(wanted.read_text()) if path == wanted else 1 / 0
    )
    assert newest_plan(tmp_path, MODEL, RANKS) == wanted


def test_a_model_of_the_same_shape_by_another_name_fits(tmp_path, put):
    searched = {"searched_from": {"model": MODEL.name, "model_fingerprint": MODEL.fingerprint}}
    wanted = put("plan.json", plan_fields(galvatron=searched))
    assert newest_plan(tmp_path, replace(MODEL, name="my-model"), RANKS) == wanted
    with pytest.raises(UserError, match="whose shape is not that of small"):
        newest_plan(tmp_path, replace(MODEL, rope_theta=1e6), RANKS)
