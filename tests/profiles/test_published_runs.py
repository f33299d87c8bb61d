"""Published runs: how far the analytic path is off, and what is fitted from a few of them."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.calibration.fit import MeasuredRun, cost_of, expected
from paddlenlp_galvatron.check.calibration.sources import Table, read_table
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, Precision, load_model
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "benchmarks" / "published_runs"
NAMES = ("qwen3-8b_8_h800.jsonl", "qwen3-30b-a3b_8_h800.jsonl", "megatron_a100.csv", "collected.csv", "dense.csv")
QWEN3, EXPERTS, MEGATRON, COLLECTED, DENSE = (TABLES / name for name in NAMES)
OFFLOADED = Path(__file__).parent / "qwen3-8b_8_h800_offloaded.jsonl"  # of the same sweep as QWEN3
H800 = load_data_sheet("h800")
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "published_runs.py"))


def read_runs(path: Path) -> list[MeasuredRun]:
    return BENCHMARK["read_runs"](path).runs


def test_with_experts_one_by_one_a_rank_with_fewer_of_them_is_much_faster():
    """As in the sweep: 65.7 s with ep 1, 37.2 s with ep 2."""
    (run,) = (run for run in read_runs(EXPERTS) if run.plan.assumed.seq_length == 8192 and run.plan.pipeline == 4)
    layers = tuple(replace(layer, ep=1) for layer in run.plan.layers)
    whole = replace(run, plan=replace(run.plan, layers=layers), kernels=run.kernels._replace(expert=5))
    assert expected(whole, H800).step_s > 1.5 * expected(run, H800).step_s
    for calls in (2, 20):  # however many its loop has
        other = replace(whole, kernels=run.kernels._replace(expert=calls))
        assert expected(other, H800).step_s > expected(run, H800).step_s


def row_with(tmp_path: Path, **cells: str) -> MeasuredRun:
    """A row of a 7B model on 64 A100."""
    reported = {"model": "m", "device": "A100-80G", "gpus": "64", "precision": "bf16", "seq": "4096", "mbs": "1"}
    reported |= {
        "gbs": "128", "tp": "1", "pp": "1", "zero": "zero1", "recompute": "none", "layers": "32", "hidden": "4096",
    }  # fmt: skip
    reported |= {"heads": "32", "kv": "32", "vocab": "32000", "ffn": "11008", "tied": "0", "step_s": "4", "source": "s"}
    reported |= cells
    (table := tmp_path / "row.csv").write_text(",".join(reported) + "\n" + ",".join(reported.values()) + "\n")
    found = read_table(table)
    if found.skipped:
        raise UserError(found.skipped[0][1])
    return found.runs[0]


def test_each_column_of_how_a_run_was_made_changes_its_prediction(tmp_path):
    def step_s(**cells: str) -> float:
        run = row_with(tmp_path, **cells)
        return expected(run, load_data_sheet(run.device)).step_s

    def allocated(**cells: str) -> float:
        run = row_with(tmp_path, **cells)
        return expected(run, load_data_sheet(run.device)).allocated_mib

    plain = step_s()
    assert step_s(attention="triton") > 1.02 * plain and step_s(attention="unfused") > 1.02 * plain
    assert step_s(kernels="plain") > 1.02 * plain
    assert step_s(grad32="0") < plain
    assert step_s(kv="8") < plain and step_s(ffn="14336") > 1.1 * plain
    assert 0.9 * plain < step_s(sharding_group="8") != plain  # more optimizer states a rank, no ring over all
    assert step_s(device="H100-80G", stack="transformer-engine") < 0.9 * step_s(device="H100-80G")
    small = {"tp": "8", "seq": "256", "gbs": "64"}
    assert step_s(**small, stack="pytorch") < 0.7 * step_s(**small)  # launches of the host
    ring = {"cp": "2", "gbs": "64"}
    assert step_s(**ring, cp_kind="ring") == step_s(**ring) != step_s(**ring, cp_kind="ulysses")
    assert step_s(**ring, overlap="0") > step_s(**ring) and step_s(tp="2", overlap="0") > step_s(tp="2")
    assert step_s(attention="plain") > step_s(attention="unfused") and step_s(ffn="16384", gpt="1") < step_s(
        ffn="16384"
    )
    assert step_s(gpt="1", ffn="16512") == pytest.approx(plain, rel=1e-3)  # two products as large as three of 11,008
    assert allocated(loss="fused") < allocated() and allocated(**ring, cp_kind="ring") < allocated(**ring)
    large = {"vocab": "256000", "loss": "fused"}  # whose head's gradient is added by the product itself
    assert allocated(**large, stack="transformer-engine") < allocated(**large)
    split = {"cp": "2", "tp": "2", "gbs": "32", "cp_kind": "ulysses"}
    assert step_s(**split) == step_s(**split | {"cp_kind": "ring"})
    for column, word in (("attention", "fast"), ("stack", "jax"), ("cp_kind", "star"), ("kernels", "odd")):
        with pytest.raises(UserError, match=f"{column} {word}"):
            row_with(tmp_path, **{column: word})
    slow = {"zero": "zero3", "network": "25"}
    assert step_s(**slow, sharding_group="8") < 0.9 * step_s(**slow)


def test_a_launch_costs_by_software_and_not_by_chip():
    shape = load_model("qwen3-8b")
    assumed = Assumptions(True, Precision.BF16, True, 4096, True, True)
    plan = uniform_plan(
        layers=shape.layers, world_size=8, global_tp_deg=8, vocab_tp=8, global_train_batch_size=64, chunks=64,
        global_checkpoint=True, assumed=assumed,
    )  # fmt: skip
    run = MeasuredRun("tp8", "made up", "h100", shape, plan, 1.0)
    h100, h800 = (expected(run, load_data_sheet(device)).step_s for device in ("h100", "h800"))
    assert h100 == pytest.approx(h800, rel=0.1)  # 8.7 and 12.9 s where launches went by chip


@pytest.mark.slow
def test_over_all_published_rows_the_bound_is_near_reserved_memory():
    """24 runs with room and 29 offloaded ones, of which only the former were fitted to."""
    runs = [run for path in (QWEN3, OFFLOADED, EXPERTS) for run in read_runs(path)]
    reported = [BENCHMARK["figures"](run, load_data_sheet(run.device)) for run in runs]
    plain, offloaded = ([row for row in reported if row["offload_optimizer"] is away] for away in (False, True))
    every, kept, away = map(BENCHMARK["errors"], (reported, plain, offloaded))
    assert every["bound_below_reserved"] == 0 and every["bound_over_reserved"] <= 0.07
    assert kept["bound_over_reserved"] <= 0.025 and away["bound_over_reserved"] <= 0.13
    assert every["allocated_mean"] <= 0.015


def test_with_several_stages_the_published_memory_is_the_first_ones():
    """A log of rank 0 knows nothing of the last stage's logits, which make it the busiest."""
    (run,) = (run for run in read_runs(QWEN3) if run.name == "pp2tp1uni_nooff")
    first = expected(run, H800).allocated_mib
    fullest = expected(replace(run, stage=None), H800).allocated_mib
    assert first == pytest.approx(run.allocated_mib, rel=0.01) and fullest > 1.1 * first


def test_an_offloaded_optimizer_leaves_the_card_and_costs_its_way_there_and_back():
    (run,) = (run for run in read_runs(QWEN3) if run.name == "pp2tp1blk_nooff")
    away = replace(run, offload_optimizer=True)
    kept, gone = (cost_of(one, H800).predict(one.plan) for one in (run, away))
    states_mib = kept.stages[0].memory.tensors_mib - gone.stages[0].memory.tensors_mib
    assert states_mib == pytest.approx(11.44 * 1024, rel=0.02)  # 12 bytes a weight, over 4 ranks
    moved_s = 2 * states_mib * 2**20 / (H800.host_link.value * 1e9)
    assert gone.time_s - kept.time_s == pytest.approx(moved_s, rel=0.02)
    for stage in gone.stages:  # the search's sum over layers stays an upper bound, also of the first update
        assert stage.memory.total_mib >= stage.memory.tensors_mib < stage.memory.apart_mib


def test_rows_that_need_more_are_named_and_broken_ones_refused(tmp_path, capsys, monkeypatch):
    skipped = read_table(DENSE).skipped
    assert len(skipped) == 3 and {need for _, need in skipped} == {"recompute selective op"}
    changed = tmp_path / "others.csv"

    def read(old: str, new: str) -> Table:
        changed.write_text(COLLECTED.read_text().replace(old, new, 1))
        return read_table(changed)

    with pytest.raises(UserError, match=r"line 2 .*quick.*correct the row"):
        read(",3755,", ",quick,")
    for old, new, need in (
        ("A100-80G", "MI300X", "a data sheet of MI300X"),
        ("bf16", "nvfp4", "precision nvfp4"),
        ("bf16", "mxfp8", "a plan that can run here: products: NVIDIA A100"),
        (",2,64,2,", ",,64,2,", "sizes of batch"),
        ("zero2", "stage2", "zero stage2"),
        ("llama-7b", "llama-7b SFT", "the model llama-7b SFT, which is no preset"),
        (",64,2,1,1,1,1,", ",63,2,1,1,1,1,", "a plan that can run here"),
    ):
        table = read(old, new)
        assert len(table.runs) == 2 and table.skipped[0][1].startswith(need), table.skipped
    changed.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no table of measured runs"):
        read_table(changed)
    read("bf16", "nvfp4")
    (other := tmp_path / "README.md").write_text("no table")
    monkeypatch.setattr("sys.argv", ["published_runs.py", str(changed), str(other)])
    assert BENCHMARK["main"]() == 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert len(last["rows"]) == 2 and len(last["skipped"]) == 2 and last["skipped"][1]["name"] == "README.md"
    assert "2 rows; 2 skipped:" in lines and "  llama-7b (PaddleNLP pretrain.rst): needs precision nvfp4" in lines


def test_adapters_alone_take_less_time_and_memory(tmp_path):
    whole, adapters = (row_with(tmp_path, lora_rank=rank) for rank in ("", "16"))
    whole, adapters = (expected(run, load_data_sheet(run.device)) for run in (whole, adapters))
    assert adapters.step_s < 0.9 * whole.step_s and adapters.allocated_mib < 0.6 * whole.allocated_mib
