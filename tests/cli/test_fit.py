"""`galvatron fit`: its table, its line of JSON, its page in both languages."""

import json
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli.what_if import work
from paddlenlp_galvatron.plan import plan_from_dict
from paddlenlp_galvatron.planner.form import Form

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "galvatron-llama2-7b"
NOTE = (
    "note: device: h100-80gb is taken as the SXM part with NVLink; for others give --device h100-nvl-94gb or "
    "h100-pcie-80gb"
)
PROMISED = (*("gpus", "fits", "tokens_per_s", "mfu", "memory_estimate_gib"), *("memory_bound_gib", "binds", "plan"))


def test_the_last_line_of_json_has_a_row_a_number_of_cards(galvatron):
    ran = galvatron("fit", "llama2-7b", "--gpus", "1,8,16", "--device", "h100-80gb", "--batch", "64", "--json")
    assert (ran.code, ran.err) == (0, f"{NOTE}\n")
    rows = json.loads(ran.out.splitlines()[-1])["rows"]
    assert [row["gpus"] for row in rows] == [1, 8, 16] and [row["fits"] for row in rows] == [False, True, True]
    assert all(name in row for row in rows for name in PROMISED)
    none, eight, sixteen = rows
    assert none["plan"] is None and none["memory_bound_gib"] > 79.1 and none["binds"] == "model states"
    assert plan_from_dict(eight["plan"]).world_size == 8
    assert eight["next_times"] == pytest.approx(sixteen["tokens_per_s"] / eight["tokens_per_s"])
    assert eight["days"] == pytest.approx(1e9 / eight["tokens_per_s"] / 86400)
    assert 0.3 < eight["mfu"] < 0.75


def test_the_table_names_every_part_of_the_bound_with_its_source(galvatron):
    ran = galvatron("fit", "llama2-7b", "--gpus", "8")
    assert ran.code == 0 and "79.1 GiB a GPU" in ran.out
    for part in ("CUDA context", "workspaces", "communicators", "allocator"):
        assert part in ran.out
    assert max(map(len, ran.out.splitlines())) < 120


def test_a_card_that_is_larger_in_the_options_than_it_is_is_a_note(galvatron):
    words = ("fit", "llama2-7b", "--gpus", "8", "--json")
    reported, plain = (galvatron(*words, *more) for more in (("--memory_constraint", "85"), ()))
    assert "note: memory_constraint: 85 GiB" in reported.err and "79.1" in reported.err and plain.err == f"{NOTE}\n"
    assert reported.out == plain.out


def test_nothing_fits_is_exit_code_three_and_says_what_binds(galvatron):
    ran = galvatron("fit", "llama3-405b", "--gpus", "8", "--json")
    assert ran.code == 3 and json.loads(ran.out)["rows"][0]["fits"] is False
    [note, refusal] = ran.err.splitlines()
    assert note == NOTE
    assert refusal.startswith("error: no plan fits: on 8 GPUs the smallest plan needs ")
    assert " GiB of it model states on stage " in refusal and refusal.endswith("; use more GPUs")


@pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
def test_measured_profiles_take_the_place_of_the_data_sheet(galvatron):
    words = ("fit", "llama2-7b", "--seq", "2048", "--gpus", "8,16", "--json")
    sources = ("--profiles", DATA, "--memory_constraint", "79.3"), ("--device", "a100")
    measured, derived = (galvatron(*words, *more) for more in sources)
    ours, sheets = (json.loads(ran.out)["rows"] for ran in (measured, derived))
    for one, other in zip(ours, sheets, strict=True):
        assert one["tokens_per_s"] != other["tokens_per_s"]
        assert one["tokens_per_s"] == pytest.approx(other["tokens_per_s"], rel=0.2)


def test_models_and_devices_are_listed(galvatron):
    shown = galvatron("fit", "--list")
    assert shown.code == 0 and "qwen2.5-7b" in shown.out and "h100-80gb" in shown.out
    assert "llama3.1-70b" in json.loads(galvatron("fit", "--list", "--json").out)["models"]


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("qwen2.5-7b", 8),
        ("llama3-8b", 8),
        pytest.param("qwen2.5-14b", 16, marks=pytest.mark.slow),
        pytest.param("llama3.1-70b", 64, marks=pytest.mark.slow),
    ],
)
def test_fit_search_and_what_if_answer_the_same_question_alike(model, gpus, galvatron, tmp_path):
    """Given model, device and number of GPUs alone: a plan that one of them proves best is not beaten by another."""
    asked = (model, "--device", "h100-80gb", "--gpus", gpus, "--json")
    (row,) = json.loads(galvatron("fit", *asked).out)["rows"]
    searched = galvatron("search", *asked)
    assert "global batch size 256 (the default)" in galvatron("search", *asked[:-1]).out
    found = json.loads(searched.out.splitlines()[-1])
    assert found["fastest"]["gap"] <= 1e-3 * (1 + 1e-9) and found["time_s"] == pytest.approx(row["step_s"], rel=1e-9)
    reported = work(Form.from_values({"model_size": model, "device": "h100-80gb", "num_nodes": gpus // 8}))
    assert reported.result.require().time_s == pytest.approx(row["step_s"], rel=1e-9)


def test_numbers_are_recommended_by_days_with_failures_and_price(galvatron):
    words = "fit llama3-8b --gpus 8,16,32 --tokens 1e12 --mtbf_hours 20000 --save_gb_per_s 2 --price h100=2.5 --json"
    ran = galvatron(*words.split(), "--days", 75, "--budget", 80_000)
    answer = json.loads(ran.out)
    rows, (cheapest, fastest, fewest) = answer["rows"], answer["recommended"]
    assert all(row["run"]["days_low"] < row["run"]["days"] < row["run"]["days_high"] for row in rows)
    assert all(row["days"] < row["run"]["days"] for row in rows)
    assert cheapest["cost"] == min(row["cost"] for row in rows) and fastest["gpus"] == 32
    assert fewest["gpus"] == 16 and fewest["days"] <= 75
    kwh = [row["energy_mwh"] * 1000 for row in rows]
    assert kwh == pytest.approx([0.7 * row["gpus"] * row["run"]["days"] * 24 for row in rows])


def test_failures_of_nodes_and_a_log_of_saves_are_as_their_numbers(tmp_path, galvatron):
    saves = [{"event": "saved", "gb": 30, "seconds": 10}, {"step": 1}, {"event": "saved", "gb": 10, "seconds": 10}]
    (tmp_path / "train_log.jsonl").write_text("".join(json.dumps(save) + "\n" for save in saves))
    words = ["fit", "llama3-8b", "--gpus", "16", "--tokens", "1e12", "--json"]
    numbers = galvatron(*words, "--mtbf_hours", 20000, "--save_gb_per_s", 2)
    named = galvatron(*words, "--mtbf_hours", "node=2500", "--save_gb_per_s", tmp_path / "train_log.jsonl")
    assert json.loads(numbers.out)["rows"] == json.loads(named.out)["rows"] and "run" in numbers.out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        pytest.param("--mtbf_hours 9", "--save_gb_per_s", id="failures without the storage's speed"),
        pytest.param("--restart_s 9", "--mtbf_hours", id="restart without failures"),
        pytest.param("--mtbf_hours gpu=9 --save_gb_per_s 1", "mtbf_hours", id="failures of no known part"),
        pytest.param("--budget 9", "--price", id="budget without a price"),
        pytest.param("--price h20=2", "no price of h100", id="a device without a price"),
        pytest.param("--price h100=2,h100=3", "twice", id="a device with two prices"),
        pytest.param("--price h1000=2", "h1000", id="a device that does not exist"),
    ],
)
def test_a_part_that_is_missing_is_named(words, fault, galvatron):
    ran = galvatron("fit", "llama2-7b", "--gpus", "8", *words.split())
    assert ran.code == 2 and fault in ran.err and not ran.out


@pytest.mark.slow
def test_a_larger_batch_that_uses_the_gpus_better_is_a_hint(galvatron):
    words = "fit mixtral-8x7b --gpus 128 --device h800 --batch 256 --json"
    hint = json.loads(galvatron(*words.split()).out)["hints"][-1]
    assert hint["options"]["settle_bsz"] == 1024 and hint["gain"] == pytest.approx(0.125, abs=0.03)
