"""Features in the guides of Galvatron and of its PaddleNLP port, line by line: each is as documented, where no other
test tries it.

The numbers are those of five guides: 000 the port, 001 using a model, 002 quick start, 003 the search engine alone,
004 using a model, in English. Fields of a plan are in tests/plan, options of GLOBAL mode in its test_uniform,
keys of profiles (003) in tests/profiles.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ
from plans import plan_fields

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.measure.options import PointOptions
from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.plan import Plan, read_plan

ROOT = Path(__file__).parents[2]
CONFIG = config_of(MODEL)


class Desk:
    """A folder with a small model and its profiles, in which a user types commands."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self._capsys = folder, capsys
        (folder / "example.json").write_text(json.dumps(CONFIG))
        for profile in (HARDWARE, COMPUTATION, MEMORY):
            profile.save(folder / "configs")

    def command(self, *words: object, code: int = 0) -> str:
        """The output of `galvatron`; it must end with this exit code."""
        self._capsys.readouterr()
        ended = main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert ended == code, err
        return out + err

    def search(self, *flags: str, code: int = 0, **options: object) -> str:
        known = {"model_size": "example.json", "num_nodes": 2, "num_gpus_per_node": 4, "memory_constraint": 8}
        values = known | {"settle_bsz": 32, "seq_length": SEQ, "output_config_path": "plan.json"} | options
        words = [f"--{name}={value}" for name, value in values.items() if value is not ...]
        return self.command("search", *words, *flags, code=code)

    def plan(self, *flags: str, **options: object) -> Plan:
        """The plan that a search finds."""
        self.search(*flags, **options)
        return read_plan(self.folder / "plan.json")

    def train(self, *flags: str, code: int = 0, **options: object) -> str:
        """The output of a run that is not started."""
        values = {"model_size": "example.json", "seq_length": SEQ, "nproc": 8} | options
        words = [f"--{name}={value}" for name, value in values.items() if value is not ...]
        return self.command("train", *words, *flags, "--dry_run", code=code)

    def script(self, name: str, *words: str, **environment: str) -> str:
        """The command that a script would run: its words, a line each script that it starts."""
        stub, reported = self.folder / "galvatron", self.folder / "given"
        stub.write_text(f'#!/bin/sh\necho "$@" >>{reported}\n')
        stub.chmod(0o755)
        reported.write_text("")
        environment = os.environ | {"GALVATRON": str(stub)} | environment
        ran = subprocess.run(
            ["bash", str(ROOT / name), *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stderr
        return reported.read_text()


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capsys)


Check = Callable[[Desk], object]
CHECKS: dict[str, Check] = {}


def line(*names: str) -> Callable[[Check], Check]:
    """Registers a check for lines of the guides."""

    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return keep


MEMORY_SCRIPT, TIME_SCRIPT = (f"scripts/profile_{name}.sh" for name in ("memory", "computation"))
SEARCH, TRAIN = "scripts/search_dist.sh", "scripts/train_dist.sh"
CLUSTER = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "4", "MASTER_ADDR": "ten", "MASTER_PORT": "71", "NODE_RANK": "1"}
SCRIPTS = [  # line, script, its environment, and words that it passes on
    ("000 MODEL_ARGS", MEMORY_SCRIPT, {"MODEL_ARGS": "--hidden_size 96"}, "--hidden_size 96"),
    ("000 MODEL_PROFILER_ARGS", MEMORY_SCRIPT, {"MODEL_PROFILER_ARGS": "--max_tp_deg 4"}, "--max_tp_deg 4"),
    ("000 memory profile_mode", MEMORY_SCRIPT, {"PROFILE_MODE": "static"}, "--profile_mode static"),
    ("000 profile_max_seq_length", MEMORY_SCRIPT, {"PROFILE_MAX_SEQ_LENGTH": "4096"}, "--profile_max_seq_length 4096"),
    ("000 computation profile_mode batch", TIME_SCRIPT, {}, "--profile_mode batch"),
    ("000 computation profile_mode", TIME_SCRIPT, {"PROFILE_MODE": "sequence"}, "--profile_mode sequence"),
    ("000 search_dist.sh", SEARCH, {}, "--model_size llama2-7b"),
    ("000 time_profile_mode", SEARCH, {"TIME_PROFILE_MODE": "batch"}, "--time_profile_mode batch"),
    ("000 memory_profile_mode", SEARCH, {"MEMORY_PROFILE_MODE": "sequence"}, "--memory_profile_mode sequence"),
    ("000 ProfileDataParserArgs", SEARCH, {"ProfileDataParserArgs": "--model_size qwen2.5-7b"}, "qwen2.5-7b"),
    ("000 SearchEngineArgs", SEARCH, {"SearchEngineArgs": "--max_bsz 64"}, "--max_bsz 64"),
    ("002 MEMORY", SEARCH, {"MEMORY": "17"}, "--memory_upper_limit 17"),
    ("001 the cluster's variables", TRAIN, CLUSTER, "--num_nodes 2 --node_rank 1 --nproc 4 --master_addr ten"),
    ("002 sh scripts/train_dist_random.sh", "scripts/train_dist_random.sh", {}, "train"),
]
SEARCHES: list[tuple[str, dict[str, object], Callable[[Plan], bool]]] = [  # line, options, and how the plan is
    ("001 search_space 3d", {"search_space": "3d"}, lambda plan: len(set(plan.layers)) == 1),
    ("001 search_space dp+tp", {"search_space": "dp+tp"}, lambda plan: len(plan.stages) == 1),
    ("001 search_space pp+tp", {"search_space": "pp+tp"}, lambda plan: plan.dp(plan.layers[0]) == 1),
    ("001 fine_grained_mode 0", {"fine_grained_mode": 0}, lambda plan: len(set(plan.layers)) == 1),
    ("001 parallel_search and worker", {"parallel_search": 1, "worker": 0}, lambda plan: plan.world_size == 8),
    ("003 --output_config_path", {"output_config_path": "plan.json"}, lambda plan: plan.world_size == 8),
    (
        "000 hidden_size_list, layer_num_list, seqlen_list",
        {"hidden_size_list": 1024, "layer_num_list": 6, "seqlen_list": SEQ, "seq_length": ...},
        lambda plan: len(plan.layers) == 6,
    ),
    ("001 set_layernum_manually", {"set_layernum_manually": 1, "num_layers": 6}, lambda plan: len(plan.layers) == 6),
]


@pytest.mark.parametrize(("script", "environment", "words"), [pytest.param(*row[1:], id=row[0]) for row in SCRIPTS])
def test_a_script_passes_on_its_variables(desk, script, environment, words):
    passed = desk.script(script, **environment).replace("=", " ").split()
    assert all(word in passed for word in words.split()), passed


@pytest.mark.parametrize(("options", "holds"), [pytest.param(*row[1:], id=row[0]) for row in SEARCHES])
def test_a_search_obeys_its_options(desk, options, holds):
    assert holds(desk.plan(**options))


# ---- 000: the port -------------------------------------------------------------------------------------------------


@line("000 profile_fixed_seq_length_list")
def _(_: Desk) -> None:
    assert PointOptions.from_mapping({"profile_fixed_seq_length_list": "128,256"}).profile_seq_length_list == (128, 256)


@line("000 seqlen_list beyond the preset's positions")
def _(desk: Desk) -> None:
    long = {"seqlen_list": 8192, "seq_length": ..., "time_profile_mode": "sequence", "memory_profile_mode": "sequence"}
    by_list = desk.search(code=2, **long)
    by_length = desk.search(code=2, **long | {"seqlen_list": ..., "seq_length": 8192})
    assert ("positions" in by_list) == ("positions" in by_length)


@line("000 the paths of the configs", *(f"003 --{name}" for name in ("memory_profiling_path", "time_profiling_path")))
@line("003 --allreduce_bandwidth_config_path", "003 --p2p_bandwidth_config_path", "003 --overlap_coe_path")
def _(desk: Desk) -> None:
    files = {
        "memory_profiling_path": "memory_profiling_bf16_hidden_1024_head_16.json",
        "time_profiling_path": "computation_profiling_bf16_hidden_1024_head_16.json",
        "allreduce_bandwidth_config_path": "allreduce_bandwidth_2nodes_4gpus_per_node.json",
        "p2p_bandwidth_config_path": "p2p_bandwidth_2nodes_4gpus_per_node.json",
        "overlap_coe_path": "overlap_coefficient.json",
    }
    (desk.folder / "mine").mkdir()
    paths = {}
    for option, name in files.items():
        paths[option] = Path("mine") / f"{option}.json"
        (desk.folder / "configs" / name).rename(desk.folder / paths[option])
    assert desk.plan(**paths)


# ---- 001, 004: using a model ---------------------------------------------------------------------------------------


@line("001 min_bsz, max_bsz, and bsz_scale, which the guide calls a ratio, is a step, and a note")
def _(desk: Desk) -> None:
    assert "batches 16, 24, 32: a step" in desk.search(settle_bsz=-1, min_bsz=16, max_bsz=32, bsz_scale=8)
    assert read_plan(desk.folder / "plan.json").global_batch in (16, 24, 32)


@line("001 every size of range(min, max + 1, step)")
def _(_: Desk) -> None:
    options = {"profile_mode": "batch", "profile_min_batch_size": 2, "profile_max_batch_size": 9}
    given = PointOptions.from_mapping(options | {"profile_batch_size_step": 3, "profile_for": "galvatron"})
    assert given.batch_sizes == [2, 5, 8] and given.every_size


@line("001 profile_min_batch_size, profile_max_batch_size, profile_batch_size_step and the same of seq_length")
@line("001 profile_batch_size", "001 profile_seq_length_list")
def _(_: Desk) -> None:
    ranges = {"profile_min_seq_length": 4, "profile_max_seq_length": 12, "profile_seq_length_step": 4}
    assert PointOptions.from_mapping({"profile_mode": "sequence", **ranges}).lengths(0) == [4, 8, 12]
    static = PointOptions.from_mapping({"profile_batch_size": 3, "profile_seq_length_list": "8"})
    assert (static.batch_sizes, static.lengths(0)) == ([3], [8])


@line("001 train: set_model_config_manually 0")
def _(desk: Desk) -> None:
    stated = desk.train(set_model_config_manually=0, hidden_size=64, global_train_batch_size=16, max_steps=1)
    assert "hidden_size ignored, as set_*_manually is 0" in stated


@line("001 set_model_config_manually of the search")
def _(desk: Desk) -> None:
    own = {"hidden_size": 1024, "num_layers": 5, "num_attention_heads": 16, "vocab_size": 32000}
    more = {"ffn_hidden_size": 4096, "num_key_value_heads": 8, "model_type": "llama"}
    assert len(desk.plan(set_model_config_manually=1, model_size=..., **own, **more).layers) == 5


@line("001 disable_tp_consec, tp_consec")
def _(desk: Desk) -> None:
    desk.search(tp_consec=0)
    assert "tp_consec" in desk.search(tp_consec=0, sp_space="tp+sp", code=2)


@line("001 sp_space tp+sp", "003 sp_time for tp+sp", "003 --sp_time_path")
def _(desk: Desk) -> None:
    groups = {"allreduce_size_4_1MB_time": 0.02, "allreduce_size_2_1MB_time": 0.02, "allreduce_size_8_1MB_time": 0.3}
    times = groups | {name.replace("allreduce", "all2all"): value / 2 for name, value in groups.items()}
    doubled = {name.replace("_1MB", "_4MB"): value * 4 for name, value in times.items()}
    (desk.folder / "sp.json").write_text(json.dumps(times | doubled))
    assert desk.plan(sp_space="tp+sp", sp_time_path="sp.json")


@line("001 galvatron_config_path FILE", "001 JSON overrides GLOBAL", "002 --galvatron_config_path")
def _(desk: Desk) -> None:
    (desk.folder / "p.json").write_text(json.dumps(plan_fields()))
    stated = desk.train(galvatron_config_path="p.json", pp_deg=4, max_steps=1)
    assert "pp_deg ignored: the plan" in stated


@line("001 the JSON as it is printed, with // comments")
def _(desk: Desk) -> None:
    text = json.dumps(plan_fields(), indent=4).replace('"chunks": 2,', '"chunks": 2,  // micro-batches, see http://x')
    (desk.folder / "p.json").write_text(text.replace("{", "{\n    // pipeline", 1))
    assert "valid: " in desk.command("plan", "check", "p.json")


@line("001 initialize_on_meta, load, save and save-interval")
def _(desk: Desk) -> None:
    weights = ROOT / "tests" / "fixtures" / "huggingface" / "llama"
    flags = ("--initialize_on_meta", f"--load={weights}", "--save=mine", "--save-interval=7")
    run = {"model_size": weights, "seq_length": 16, "global_train_batch_size": 16, "train_iters": 1}
    assert "no step was run" in desk.train(*flags, **run)


@line("001 folders of models", "003 profile_hardware/hardware_configs", "003 models/{model_name}/configs")
def _(desk: Desk) -> None:
    model, hardware = (desk.folder / name for name in ("models/a/configs", "profile_hardware/hardware_configs"))
    shutil.copytree(desk.folder / "configs", model)
    hardware.parent.mkdir()
    (desk.folder / "configs").rename(hardware)
    assert desk.plan(
        **dict.fromkeys(("time_profiling_path", "memory_profiling_path"), model),
        **dict.fromkeys(("allreduce_bandwidth_config_path", "p2p_bandwidth_config_path"), hardware),
        overlap_coe_path=hardware,
    )


@pytest.mark.parametrize("name", CHECKS)
def test_a_documented_line_holds(desk, name):
    CHECKS[name](desk)


def test_exceptions_are_reported(desk):
    assert "--mpi_path (ranks are started without MPI" in desk.command("profile", "hardware", "--mpi_path=/usr/mpi")
    assert "--backend (messages go through Paddle" in desk.command("profile", "hardware", "--backend=nccl")
    assert "shown as on GPUs" in desk.train("--use-flash-attn", global_train_batch_size=16, max_steps=1)
