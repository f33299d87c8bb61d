"""Data sheets from measured steps: made-up clusters whose numbers are known, logs, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.calibration.fit import MeasuredRun, calibrate, expected
from paddlenlp_galvatron.check.calibration.sources import read_table
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Precision, load_model, plan_id, write_plan
from paddlenlp_galvatron.plan.file import plan_to_dict
from paddlenlp_galvatron.profiles.data_sheet import DataSheet, load_data_sheet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H800 = load_data_sheet("h800")
SHAPE = load_model("qwen3-8b")
# Long samples and whole weights spend their time in products, messages of eight ranks on links, short samples in sums
# of gradients, in memory; with a slow host and split weights most time goes by waiting for it.
LAYOUTS = [(1, 4096, 4), (8, 4096, 4), (1, 4096, 2), (8, 4096, 2)]  # tp, sequence length, samples of a rank
IN_MEMORY, FOR_THE_HOST, LONG = [(1, 512, 1), (1, 640, 1)], [(4, 128, 2), (8, 128, 2)], [(1, 32768, 1), (2, 32768, 1)]


def cluster(sheet: DataSheet = H800, **numbers: float) -> DataSheet:
    return sheet.model_copy(
        update={name: getattr(sheet, name).model_copy(update={"value": value}) for name, value in numbers.items()}
    )


def run_of(
    sheet: DataSheet, tp: int, seq: int, samples: int, shape: ModelShape = SHAPE, gpus: int = 8, **plan: int
) -> MeasuredRun:
    """Measurements on a made-up cluster."""
    assumed = Assumptions(True, Precision.BF16, True, seq, True, True)
    batch = 32 * samples * (gpus // tp // plan.get("pp_deg", 1))
    made = uniform_plan(
        layers=shape.layers, world_size=gpus, global_tp_deg=tp, vocab_tp=tp, global_train_batch_size=batch, chunks=32,
        default_dp_type="zero2", assumed=assumed, **plan,
    )  # fmt: skip
    run = MeasuredRun(f"tp{tp} seq{seq}", "made up", "h800", shape, made, 1.0)
    return replace(run, step_s=expected(run, sheet).step_s)


@pytest.mark.parametrize(
    ("device", "third", "numbers"),
    [
        ("h800", FOR_THE_HOST, {"matmul_efficiency": 0.52, "link_efficiency": 0.70, "launch": 25.0}),
        ("h800", FOR_THE_HOST, {"matmul_efficiency": 0.66, "link_efficiency": 0.86, "launch": 45.0}),
        ("a100", IN_MEMORY, {"matmul_efficiency": 0.62, "memory_efficiency": 0.64}),
        ("a100", IN_MEMORY, {"matmul_efficiency": 0.76, "memory_efficiency": 0.76}),
        ("a100", LONG, {"matmul_efficiency": 0.76, "attention_efficiency": 0.3}),
    ],
)
def test_the_numbers_of_a_made_up_cluster_are_found_from_two_runs_for_each(device, third, numbers):
    sheet = load_data_sheet(device)
    true = cluster(sheet, **numbers)
    found = calibrate([run_of(true, *layout) for layout in (*LAYOUTS, *third)], sheet)
    assert found.refusal is None
    assert {number.name for number in found.numbers if number.determined} >= set(numbers)
    for number in found.numbers:
        asked = number.name in numbers
        assert number.after == pytest.approx(getattr(true, number.name).value, rel=0.03 if asked else 0.15), number
    assert found.sheet.network_efficiency.value == sheet.network_efficiency.value  # one node has no traffic over it
    assert max(map(abs, found.after)) < 0.01 < max(map(abs, found.before))
    other = run_of(true, 2, 4096, 1, pp_deg=2)
    before, after = (abs(expected(other, one).step_s / other.step_s - 1) for one in (sheet, found.sheet))
    assert after < 0.01 and after < before


@pytest.mark.parametrize("numbers", [{}, {"matmul_efficiency": 0.55}])
def test_a_sheet_that_explains_the_left_out_runs_no_better_is_refused(numbers):
    """Runs that contradict each other: one of them half as fast, for a reason that no number has."""
    first, second, *_ = (run_of(cluster(**numbers), *layout) for layout in LAYOUTS)
    found = calibrate([replace(first, step_s=2 * first.step_s), replace(first, step_s=first.step_s / 2), second], H800)
    assert found.refusal and "keep" in found.refusal


def test_a_long_sample_shows_attention_and_not_of_how_products_begin():
    """One of 32k tokens among three: a slow attention is found as such."""
    true = cluster(attention_efficiency=0.16)
    runs = [run_of(true, *layout) for layout in ((1, 4096, 4), (1, 16384, 1), (1, 32768, 1))]
    found = calibrate(runs, H800)
    assert found.sheet.attention_efficiency.value == pytest.approx(0.16, rel=0.1)
    assert found.sheet.product_start.value == pytest.approx(H800.product_start.value, rel=0.1)
    other = run_of(true, 2, 32768, 1)
    assert abs(expected(other, found.sheet).step_s / other.step_s - 1) < 0.02


@settings(max_examples=4)
@given(st.floats(10, 400), st.floats(0.52, 0.72), st.sampled_from([(32, 128), (64, 64), (128, 32)]))
def test_five_runs_show_a_slow_network_where_they_hold_it_and_say_so_where_they_do_not(network, products, gpus):
    """The sheet has 400 GB/s; on one node nothing shows the network."""
    true, (more, fewer) = cluster(network=network, matmul_efficiency=products), gpus
    layouts = [(1, 1, more), (2, 2, more), (4, 1, more), (2, 1, fewer), (1, 4, fewer)]
    found = calibrate([run_of(true, tp, 2048, 1, gpus=number, pp_deg=pp) for tp, pp, number in layouts], H800)
    (number,) = (number for number in found.numbers if number.name == "network")
    assert (number.determined and not number.unclear) or network > 60
    assert number.unclear or number.after == pytest.approx(network, rel=0.35)
    other = run_of(true, 1, 2048, 1, gpus=more, pp_deg=2)
    assert abs(expected(other, found.sheet).step_s / other.step_s - 1) < 0.1
    (number,) = (each for each in calibrate([run_of(true, 1, 2048, 1)], H800).numbers if each.name == "network")
    assert not number.determined and number.unclear == "the runs hardly depend on it"


def test_one_run_already_helps():
    true = cluster(matmul_efficiency=0.5)
    found = calibrate([run_of(true, 1, 4096, 4)], H800)
    assert not found.apart and abs(found.after[0]) < 0.06
    for layout in ((2, 4096, 2), (4, 2048, 4)):
        other = run_of(true, *layout)
        before, after = (abs(expected(other, sheet).step_s / other.step_s - 1) for sheet in (H800, found.sheet))
        assert after < before / 2


def test_the_command_reads_logs_with_their_plans_and_writes_a_sheet_for_the_others(tmp_path, capsys):
    true = cluster(matmul_efficiency=0.5)
    run = run_of(true, 1, 4096, 4)
    plan, log, node = (tmp_path / name for name in ("plan.json", "train_log.jsonl", "node.json"))
    write_plan(run.plan, plan)
    lines = logged(run)
    log.write_text("\n".join(lines) + "\n")
    given = ["calibrate", str(log), "--plans", str(plan), "--output", str(node)]
    assert main(given) == 2 and "give the data sheet" in capsys.readouterr().err
    given += ["--device", "h800"]
    assert main(given) == 2 and "model_size: missing" in capsys.readouterr().err
    given += ["--model_size", "qwen3-8b"]
    assert main(given) == 0
    assert "matmul_efficiency" in (reported := capsys.readouterr().out) and "Elsewhere" in reported
    sheet = load_data_sheet(node)
    assert sheet.matmul_efficiency.value < 0.55 and "calibrated from 1 runs" in sheet.matmul_efficiency.source
    assert main(["fit", "qwen3-8b", "--gpus", "8", "--device", str(node), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] == "fits"
    plain = json.loads(node.read_text())
    log.write_text("".join(f"[1,0]<stdout>:{line}\n" for line in lines))
    assert main(given) == 0 and json.loads(node.read_text()) == plain
    capsys.readouterr()
    log.write_text("".join(f"{line}\n" for line in [*lines[:3], "a line of another program", *lines[3:]]))
    assert main(given) == 0 and json.loads(node.read_text()) == plain
    assert "1 damaged lines are skipped, the first is line 4" in capsys.readouterr().err
    log.write_text("\n".join(lines[:5]))
    assert main(given) == 2 and "train 3 more" in capsys.readouterr().err
    validation = tmp_path / "validation.json"
    validation.write_text(json.dumps({"plans": [{"measured_s": run.step_s, "plan": plan_to_dict(run.plan)}]}))
    given = ["calibrate", str(validation), "--device", "h800", "--model", "qwen3-8b", "--output", str(node), "--json"]
    assert main(given) == 0


def logged(run: MeasuredRun, **changed: str) -> list[str]:
    """Lines of the run's log; `changed`: JSON of some fields of the last one."""
    record = {"step": 0, "loss": 2.0, "lr": 1e-4, "grad_norm": 1.0, "step_time_s": run.step_s + 0.5, "data_s": 0.5,
              "tokens_per_s": 9.0, "plan": plan_id(run.plan), "peak_memory_mib": [100.0] * 8}  # fmt: skip
    lines = [json.dumps(record | {"step": step}) for step in range(12)]
    for name, text in changed.items():
        lines[-1] = lines[-1].replace(f'"{name}": {json.dumps(record[name])}', f'"{name}": {text}')
    return lines


VALUES = st.sampled_from(
    ["-1", "0", "true", "null", '"x"', "[]", "{}", "1e400", "NaN", "1e300", "-0.0", "1" + "0" * 400]
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["step_time_s", "data_s", "peak_memory_mib"]), VALUES)
def test_a_number_that_no_step_has_is_refused_or_its_line_is_skipped_by_number(tmp_path, capsys, name, text):
    assume((name, text) not in [("data_s", "0"), ("data_s", "-0.0")])
    run = run_of(H800, 1, 4096, 4)
    plan, log, node = (tmp_path / each for each in ("plan.json", "train_log.jsonl", "node.json"))
    write_plan(run.plan, plan)
    log.write_text("\n".join(logged(run, **{name: text})) + "\n")
    capsys.readouterr()
    words = ["calibrate", str(log), "--plans", str(plan), "--device", "h800", "--model_size", "qwen3-8b"]
    code, reported = main([*words, "--output", str(node)]), capsys.readouterr().err
    assert "1 damaged lines are skipped, the first is line 12" in reported or (code == 2 and "its step 12" in reported)
    assert "unexpected" not in reported


@pytest.mark.parametrize("value", ["-1", "0", "true", "null", '"x"', "1e300"])
def test_a_validation_with_no_time_is_refused(tmp_path, capsys, value):
    file = tmp_path / "validation.json"
    file.write_text(f'{{"plans": [{{"measured_s": {value}, "plan": {{}}}}]}}')
    assert main(["calibrate", str(file), "--device", "h800", "--model_size", "qwen3-8b"]) == 2
    assert "plans.0: no measured_s" in capsys.readouterr().err


ROW = {"source": "mine", "model": "qwen2.5-7b", "device": "B200", "gpus": "8", "precision": "bf16", "seq": "4096",
       "mbs": "1", "gbs": "64", "tp": "1", "pp": "1", "vpp": "1", "cp": "1", "ep": "1", "zero": "zero2",
       "recompute": "full", "step_s": "3.1"}  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    path.write_text("\n".join([",".join(ROW), *(",".join((ROW | row).values()) for row in rows)]))
    return path


@pytest.mark.parametrize("column", ["gpus", "seq", "mbs", "gbs", "tp", "pp", "vpp", "cp", "ep", "step_s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e400"])
def test_a_row_whose_numbers_are_not_above_0_is_refused_by_line_and_column(tmp_path, column, value):
    with pytest.raises(UserError, match=rf"line 3 .*{column} is {value}, which must be above 0"):
        read_table(table(tmp_path / "runs.csv", {}, {column: value}))


def test_a_row_that_cannot_be_stated_is_skipped_by_name_and_the_others_are_read(tmp_path):
    header = dict.fromkeys((*ROW, "lora_rank", "x_lora_rank"), "")
    rows = [{}, {"tp": "16"}, {"model": "qwen3-30b-a3b", "lora_rank": "8"}, {"x_lora_rank": "8"}]
    lines = [",".join((header | ROW | {"device": "h100"} | row).values()) for row in rows]
    (file := tmp_path / "runs.csv").write_text("\n".join([",".join(header), *lines]))
    found = read_table(file)
    assert [run.adapter_rank for run in found.runs] == [None, 8, 8]
    assert [needs.partition(":")[0] for _, needs in found.skipped] == ["16 gpus for its tp x pp x cp, and has 8"]


def test_rows_of_a_sheet_of_ones_own_are_found_by_its_names_and_those_of_others_left_out(tmp_path, capsys):
    sheet = tmp_path / "my-b200.json"
    own = json.loads(H800.model_dump_json()) | {
        "name": "b200-180gb",
        "device": "NVIDIA B200",
        "drivers": ["NVIDIA B200 SXM"],
    }
    sheet.write_text(json.dumps(own))
    names = ["b200-180gb", "b200", "B200-180GB", "NVIDIA B200", "NVIDIA B200 SXM", "my-b200.json", "my-b200", ""]
    others = [{"device": "A100-80G"}, {"device": "MI300X"}]
    found = read_table(table(tmp_path / "runs.csv", *({"device": name} for name in names), *others), device=str(sheet))
    assert [run.device for run in found.runs] == [str(sheet)] * len(names)
    assert [needs for _, needs in found.skipped] == [
        "--device a100-80gb", f"a data sheet of MI300X; that of {sheet} is called b200-180gb",
    ]  # fmt: skip
    words = ["calibrate", str(tmp_path / "runs.csv"), "--device", str(sheet), "--output", str(tmp_path / "node.json")]
    assert main(words) == 0 and "MI300X; that of" in capsys.readouterr().err
    shipped = read_table(table(tmp_path / "runs.csv", {"device": "NVIDIA H100 80GB HBM3"}, {"device": "h100"}))
    assert [run.device for run in shipped.runs] == ["h100-80gb"] * 2


def test_steps_on_processors_move_the_predictions_of_other_plans_towards_what_is_measured():
    """A hundred times as slow as the sheet's device: no number explains it, and the command says so."""
    shape = ModelShape("small", "qwen2", 8, 256, 704, 8, 4, 4096, 512)
    assumed = Assumptions(True, Precision.FP32, True, 128, False, False)

    def measured(step_s: float, **plan: int) -> MeasuredRun:
        made = uniform_plan(layers=8, world_size=4, global_train_batch_size=16, chunks=2, assumed=assumed, **plan)
        return MeasuredRun("small", "log", "h100", shape, made, step_s)

    one, other, third = measured(0.8), measured(0.9, pp_deg=2), measured(1.4, global_tp_deg=2, vocab_tp=2)
    sheet = load_data_sheet("h100")
    found = calibrate([one], sheet)
    for run in (other, third):
        before, after = (expected(run, each).step_s / run.step_s for each in (sheet, found.sheet))
        assert before < 0.07 and 0.4 < after < 1.6
    assert any("unreliable" in line for line in calibrate([one, third], sheet).lines())
