"""Features in the guides of Galvatron and of its PaddleNLP port, line by line: each is as documented.

The numbers are those of five guides: 000 the port, 001 using a model, 002 quick start, 003 the search engine alone,
004 using a model, in English. `seeds_elsewhere` has lines that other tests show, and what does not hold, and why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.measure.options import PointOptions
from paddlenlp_galvatron.options.group import canonical_options
from paddlenlp_galvatron.plan import DataParallel, Plan, Recompute, Schedule, plan_from_dict, read_plan
from paddlenlp_galvatron.profiles import ComputationProfile, HardwareProfile, Shape
from paddlenlp_galvatron.training.prepare import GROUPS, prepare

from .seeds_elsewhere import EXCEPTIONS, SHOWN_BY

ROOT = Path(__file__).parents[2]
PORT = "llm/auto_parallel/galvatron-llama-submit"
CONFIG = {
    "model_type": MODEL.family,
    "num_hidden_layers": MODEL.layers,
    "hidden_size": MODEL.hidden_size,
    "intermediate_size": MODEL.intermediate_size,
    "num_attention_heads": MODEL.heads,
    "num_key_value_heads": MODEL.kv_heads,
    "vocab_size": MODEL.vocab_size,
    "max_position_embeddings": MODEL.max_position_embeddings,
}
END = "========================= Galvatron Search Engine End Searching ========================="


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

    def globally(self, *flags: str, **options: object) -> Plan:
        """The plan of GLOBAL mode."""
        values = {"model_size": "example.json", "seq_length": SEQ, "global_train_batch_size": 16, "max_steps": 1}
        given = values | {flag.strip("-"): "1" for flag in flags} | options
        known = {name for group in GROUPS for name in group.model_fields}
        plan, _ = prepare(canonical_options(given, known), 8).settings.load_plan()
        return plan

    def script(self, name: str, *words: str, shell: str = "bash", **environment: str) -> str:
        """The command that a script would run: its words, a line each script that it starts."""
        stub, reported = self.folder / "galvatron", self.folder / "given"
        stub.write_text(f'#!/bin/sh\necho "$@" >>{reported}\n')
        stub.chmod(0o755)
        reported.write_text("")
        environment = os.environ | {"GALVATRON": str(stub)} | environment
        ran = subprocess.run(
            [shell, str(ROOT / name), *words],
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


def shows(name: str, *words: str, **environment: str) -> Check:
    """A script that, with this environment, passes on these words."""

    def check(desk: Desk) -> None:
        reported = " ".join(desk.script(name, **environment).replace("=", " ").split())
        assert all(word in reported for word in words), reported

    return check


def finds(holds: Callable[[Plan], bool], **options: object) -> Check:
    """A search with these options whose plan is so, and the same space without them."""

    def check(desk: Desk) -> None:
        assert holds(desk.plan(**options))

    return check


def reads(holds: Callable[[Plan], bool], **fields: object) -> Check:
    """A plan file with these fields is such a plan."""

    def check(_: Desk) -> None:
        assert holds(plan_from_dict(STRATEGY | fields, 8))

    return check


STRATEGY: dict[str, Any] = {
    "pp_deg": 2,
    "pp_division": "2,2",
    "pipeline_type": "pipedream_flush",
    "chunks": 2,
    "tp_sizes_enc": "2,2,4,1",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "0,1,0,0",
    "default_dp_type": "zero2",
    "use_sp": "0,0,1,0",
    "checkpoint": "1,0,0,0",
    "global_bsz": 16,
    "vtp": 2,
    "vsp": 0,
    "embed_sdp": 0,
}

# ---- 000: the port -------------------------------------------------------------------------------------------------

MEASURE = "scripts/profile_hardware.sh"
PARTS = ("allreduce", "p2p", "allreduce_sp", "all2all", "overlap")


@line("000 scripts in the port's own folder", "000 cd there and bash scripts/X.sh")
def _(desk: Desk) -> None:
    for name in ("profile_memory", "profile_computation", "search_dist"):
        assert "example.json" in desk.script(f"{PORT}/scripts/{name}.sh", MODEL_SIZE="example.json")


@line("000 profile_hardware.sh writes five scripts", *(f"000 profile_{part}.sh" for part in PARTS))
def _(desk: Desk) -> None:
    for part in PARTS:
        written = ROOT / "scripts" / f"profile_{part}.sh"
        written.unlink(missing_ok=True)
    desk.script(MEASURE)
    for part in PARTS:
        assert f"--parts {part} " in desk.script(f"scripts/profile_{part}.sh")


CHECKS |= {
    "000 PROFILE_HARDWARE_ARGS": lambda desk: (
        desk.script(MEASURE, PROFILE_HARDWARE_ARGS="--end_mb 4"),
        shows("scripts/profile_p2p.sh", "--end_mb 4")(desk),
    ),
    "000 MODEL_ARGS": shows("scripts/profile_memory.sh", "--hidden_size 96", MODEL_ARGS="--hidden_size 96"),
    "000 MODEL_PROFILER_ARGS": shows(
        "scripts/profile_memory.sh", "--max_tp_deg 4", MODEL_PROFILER_ARGS="--max_tp_deg 4"
    ),
    "000 memory profile_mode static": shows(
        "scripts/profile_memory.sh", "--profile_mode static", PROFILE_MODE="static"
    ),
    "000 memory profile_mode sequence": shows(
        "scripts/profile_memory.sh", "--profile_mode sequence", PROFILE_MODE="sequence"
    ),
    "000 profile_max_seq_length": shows(
        "scripts/profile_memory.sh", "--profile_max_seq_length 4096", PROFILE_MAX_SEQ_LENGTH="4096"
    ),
    "000 computation profile_mode batch": shows("scripts/profile_computation.sh", "--profile_mode batch"),
    "000 computation profile_mode sequence": shows(
        "scripts/profile_computation.sh", "--profile_mode sequence", PROFILE_MODE="sequence"
    ),
    "000 search_dist.sh": shows("scripts/search_dist.sh", "search ", "--model_size llama2-7b"),
    "000 time_profile_mode": shows("scripts/search_dist.sh", "--time_profile_mode batch", TIME_PROFILE_MODE="batch"),
    "000 memory_profile_mode": shows(
        "scripts/search_dist.sh", "--memory_profile_mode sequence", MEMORY_PROFILE_MODE="sequence"
    ),
    "000 ProfileDataParserArgs": shows(
        "scripts/search_dist.sh", "--model_size qwen2.5-7b", ProfileDataParserArgs="--model_size qwen2.5-7b"
    ),
    "000 SearchEngineArgs": shows("scripts/search_dist.sh", "--max_bsz 64", SearchEngineArgs="--max_bsz 64"),
    "000 max_tp_size": finds(lambda plan: max(layer.degree for layer in plan.layers) <= 2, max_tp_size=2),
    "000 max_pp_size": finds(lambda plan: len(plan.stages) == 1, max_pp_size=1),
}


@line("000 profile_fixed_seq_length_list")
def _(_: Desk) -> None:
    assert PointOptions.from_mapping({"profile_fixed_seq_length_list": "128,256"}).profile_seq_length_list == (128, 256)


@line("000 hidden_size_list, layer_num_list, seqlen_list")
def _(desk: Desk) -> None:
    lists = {"hidden_size_list": 1024, "layer_num_list": 6, "seqlen_list": SEQ, "seq_length": ...}
    assert len(desk.plan(**lists).layers) == 6


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


@line("000 memory_upper_limit in GB", "001 memory_constraint", "002 MEMORY")
def _(desk: Desk) -> None:
    assert "devices of 6 GiB" in desk.search(memory_constraint=..., memory_upper_limit=6)
    shows("scripts/search_dist.sh", "--memory_upper_limit 17", MEMORY="17")(desk)


@line("000 the best plan as JSON in configs", "002 galvatron_config_{model_size}_ in configs")
def _(desk: Desk) -> None:
    desk.search(output_config_path=...)
    (found,) = (desk.folder / "configs").glob("galvatron_config_example_*.json")
    assert read_plan(found).world_size == 8


@line("000 bash train_qwen_fine_grained.sh runs the best plan")
def _(desk: Desk) -> None:
    assert "run_pretrain_galvatron.py" in (ROOT / PORT / "train_qwen_fine_grained.sh").read_text()


@line("000 galvatron_dp_core")
def _(_: Desk) -> None:
    import galvatron_dp_core

    assert galvatron_dp_core.__name__ == "galvatron_dp_core"


# ---- 001, 004: using a model ---------------------------------------------------------------------------------------

CHECKS |= {
    "001 sh scripts/profile_computation.sh": lambda desk: desk.script("scripts/profile_computation.sh", shell="sh"),
    "001 sh scripts/profile_memory.sh": lambda desk: desk.script("scripts/profile_memory.sh", shell="sh"),
    "001 sh scripts/search_dist.sh": lambda desk: desk.script("scripts/search_dist.sh", shell="sh"),
    "001 sh scripts/train_dist.sh": lambda desk: desk.script("scripts/train_dist.sh", shell="sh"),
    "001 model_size": lambda desk: desk.search(),
    "001 settle_chunk": finds(lambda plan: plan.micro_batches == 8, settle_chunk=8),
    "001 settle_bsz": finds(lambda plan: plan.global_batch == 64, settle_bsz=64),
    "001 min_bsz, max_bsz, bsz_scale": finds(
        lambda plan: plan.global_batch in (16, 24, 32), settle_bsz=-1, min_bsz=16, max_bsz=32, bsz_scale=8
    ),
    "001 bsz_scale, which the guide calls a ratio, is a step, and a note": lambda desk: _same(
        "batches 16, 24, 32: a step" in desk.search(settle_bsz=-1, min_bsz=16, max_bsz=32, bsz_scale=8), True
    ),
    "001 search_space full": finds(lambda plan: True, search_space="full"),
    "001 search_space 3d": finds(lambda plan: len(set(plan.layers)) == 1, search_space="3d"),
    "001 search_space dp+sdp": finds(
        lambda plan: len(plan.stages) == 1 and plan.layers[0].degree == 1, search_space="dp+sdp+ckpt"
    ),
    "001 search_space dp+tp": finds(
        lambda plan: len(plan.stages) == 1 and not plan.layers[0].recompute, search_space="dp+tp"
    ),
    "001 search_space pp+tp": finds(lambda plan: plan.dp(plan.layers[0]) == 1, search_space="pp+tp"),
    "001 disable_dp": finds(lambda plan: all(plan.dp(layer) == 1 for layer in plan.layers), disable_dp=1),
    "001 disable_tp": finds(lambda plan: all(layer.tp == 1 for layer in plan.layers), disable_tp=1),
    "001 disable_vtp": finds(lambda plan: plan.vocab.degree == 1, disable_vtp=1),
    "001 disable_pp": finds(lambda plan: len(plan.stages) == 1, disable_pp=1),
    "001 disable_sdp": finds(
        lambda plan: all(layer.dp_type is not DataParallel.ZERO3 for layer in plan.layers), disable_sdp=1
    ),
    "001 disable_ckpt": finds(lambda plan: not any(layer.recompute for layer in plan.layers), disable_ckpt=1),
    "001 fine_grained_mode 0": finds(lambda plan: len(set(plan.layers)) == 1, fine_grained_mode=0),
    "001 fine_grained_mode 1": finds(lambda plan: True, fine_grained_mode=1),
    "001 sequence-parallel of the search": lambda desk: finds(
        lambda plan: plan.assumed.sequence_parallel, **{"sequence-parallel": 1}
    )(desk),
    "001 profile_mode static": finds(lambda plan: True, profile_mode="static"),
    "001 profile_mode batch": finds(lambda plan: True, profile_mode="batch"),
    "001 profile_mode sequence": finds(lambda plan: True, profile_mode="sequence"),
    "001 sp_space tp": finds(lambda plan: not any(layer.ulysses for layer in plan.layers), sp_space="tp"),
    "001 no_global_memory_buffer": lambda desk: desk.search("--no_global_memory_buffer"),
    "001 parallel_search": finds(lambda plan: True, parallel_search=1),
    "001 worker": finds(lambda plan: True, parallel_search=1, worker=2),
    "001 worker 0 is the default": finds(lambda plan: True, parallel_search=1, worker=0),
    "001 pp_deg": reads(lambda plan: len(plan.stages) == 2),
    "001 pp_division": reads(lambda plan: plan.stages == (1, 3), pp_division="1,3"),
    "001 pipeline_type": reads(lambda plan: plan.schedule is Schedule.GPIPE, pipeline_type="gpipe"),
    "001 chunks": reads(lambda plan: plan.micro_batches == 4, chunks=4),
    "001 tp_sizes_enc": reads(lambda plan: [layer.degree for layer in plan.layers] == [2, 2, 4, 1]),
    "001 tp_consecutive_flags": reads(lambda plan: not plan.layers[0].consecutive, tp_consecutive_flags="0,1,1,1"),
    "001 dp_types_enc": reads(lambda plan: plan.layers[1].dp_type is DataParallel.ZERO3),
    "001 default_dp_type": reads(lambda plan: plan.layers[0].dp_type is DataParallel.ZERO2),
    "001 use_sp": reads(lambda plan: [layer.ulysses for layer in plan.layers] == [False, False, True, False]),
    "001 checkpoint": reads(
        lambda plan: [bool(layer.recompute) for layer in plan.layers] == [True, False, False, False]
    ),
    "001 global_bsz": reads(lambda plan: plan.global_batch == 32, global_bsz=32),
    "001 vtp": reads(lambda plan: plan.vocab.degree == 4, vtp=4),
    "001 vsp": reads(lambda plan: plan.vocab.ulysses, vsp=1),
    "001 embed_sdp": reads(lambda plan: plan.vocab.dp_type is DataParallel.ZERO3, embed_sdp=1),
    "001 GLOBAL pp_deg": lambda desk: _same(len(desk.globally(pp_deg=2).stages), 2),
    "001 GLOBAL global_tp_deg": lambda desk: _same(desk.globally(global_tp_deg=4).layers[0].tp, 4),
    "001 GLOBAL global_tp_consec": lambda desk: _same(
        desk.globally(global_tp_deg=2, global_tp_consec=0).layers[0].consecutive, False
    ),
    "001 GLOBAL sdp": lambda desk: _same(desk.globally(sdp=1).layers[0].dp_type, DataParallel.ZERO3),
    "001 GLOBAL global_train_batch_size": lambda desk: _same(
        desk.globally(global_train_batch_size=24).global_batch, 24
    ),
    "001 GLOBAL chunks": lambda desk: _same(desk.globally(chunks=2).micro_batches, 2),
    "001 GLOBAL global_checkpoint": lambda desk: _same(
        desk.globally(global_checkpoint=1).layers[0].recompute, Recompute.FULL
    ),
    "001 GLOBAL pipeline_type": lambda desk: _same(desk.globally(pipeline_type="gpipe").schedule, Schedule.GPIPE),
    "001 GLOBAL vocab_tp": lambda desk: _same(desk.globally(vocab_tp=4).vocab.tp, 4),
    "001 use_ulysses": lambda desk: _same(desk.globally(global_tp_deg=2, use_ulysses=1).layers[0].ulysses, True),
    "001 mixed_precision": lambda desk: _same(
        desk.globally(mixed_precision="bf16").assumed.mixed_precision.value, "bf16"
    ),
    "001 sequence-parallel of training": lambda desk: _same(
        desk.globally("--sequence-parallel").assumed.sequence_parallel, True
    ),
    "001 no_async_grad_reduce": lambda desk: _same(
        desk.globally("--no_async_grad_reduce").assumed.async_grad_reduce, False
    ),
}


def _same(found: object, documented: object) -> None:
    assert found == documented


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


@line("001 set_model_config_manually and set_layernum_manually of the search")
def _(desk: Desk) -> None:
    own = {"hidden_size": 1024, "num_layers": 5, "num_attention_heads": 16, "vocab_size": 32000}
    more = {"ffn_hidden_size": 4096, "num_key_value_heads": 8, "model_type": "llama"}
    assert len(desk.plan(set_model_config_manually=1, model_size=..., **own, **more).layers) == 5
    assert len(desk.plan(set_layernum_manually=1, num_layers=6).layers) == 6


@line("001 num_nodes and num_gpus_per_node")
def _(desk: Desk) -> None:
    assert "on 2 x 4 devices" in desk.search()


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


@line("001 log_dir", "002 a log that starts with Search", "002 the line at its end")
def _(desk: Desk) -> None:
    desk.search(log_dir="mine")
    (log,) = (desk.folder / "mine").glob("Search*")
    assert log.read_text().splitlines()[-1] == END


@line("001 galvatron_config_path FILE", "001 JSON overrides GLOBAL", "002 --galvatron_config_path")
def _(desk: Desk) -> None:
    (desk.folder / "p.json").write_text(json.dumps(STRATEGY | {"world_size": 8}))
    stated = desk.train(galvatron_config_path="p.json", pp_deg=4, max_steps=1)
    assert "pp_deg ignored: the plan" in stated


@line("001 galvatron_config_path None")
def _(desk: Desk) -> None:
    assert desk.globally(galvatron_config_path="None", pp_deg=2).stages == (2, 2)


@line("001 the JSON as it is printed, with // comments")
def _(desk: Desk) -> None:
    text = json.dumps(STRATEGY, indent=4).replace('"chunks": 2,', '"chunks": 2,  // micro-batches, see http://x')
    (desk.folder / "p.json").write_text(text.replace("{", "{\n    // pipeline", 1))
    assert "valid: " in desk.command("plan", "check", "p.json")


@line("001 convert_{type}_h2g.sh in tools", "001 convert_{type}_g2h.sh in tools", "001 INPUT_PATH and OUTPUT_PATH")
@line("004 convert_{type}.sh in tools")
def _(desk: Desk) -> None:
    for family in ("llama", "qwen"):
        for way in ("_h2g", "_g2h", ""):
            reported = desk.script(f"tools/convert_{family}{way}.sh", INPUT_PATH="in", OUTPUT_PATH="out")
            assert "convert" in reported and "in" in reported.split() and "out" in reported.split()


@line("001 initialize_on_meta, load, save and save-interval")
def _(desk: Desk) -> None:
    weights = ROOT / "tests" / "fixtures" / "huggingface" / "llama"
    flags = ("--initialize_on_meta", f"--load={weights}", "--save=mine", "--save-interval=7")
    run = {"model_size": weights, "seq_length": 16, "global_train_batch_size": 16, "train_iters": 1}
    assert "no step was run" in desk.train(*flags, **run)


@line("001 set_layernum_manually and set_seqlen_manually of training", "002 --set_seqlen_manually")
def _(desk: Desk) -> None:
    plan = desk.globally(set_layernum_manually=1, num_hidden_layers=2, set_seqlen_manually=1)
    assert len(plan.layers) == 2 and plan.assumed.seq_length == SEQ


CLUSTER = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "4", "MASTER_ADDR": "ten", "MASTER_PORT": "71", "NODE_RANK": "1"}
for variable in CLUSTER:
    CHECKS[f"001 {variable}"] = shows(
        "scripts/train_dist.sh", "--num_nodes 2", "--nproc 4", "--master_addr ten", "--node_rank 1", **CLUSTER
    )

# ---- 002: quick start ----------------------------------------------------------------------------------------------

CHECKS |= {
    "002 NUM_NODES and NUM_GPUS_PER_NODE in profile_hardware.sh": lambda desk: (
        desk.script(MEASURE, NUM_NODES="3", NUM_GPUS_PER_NODE="2"),
        shows("scripts/profile_overlap.sh", "--num_nodes 3", "--num_gpus_per_node 2")(desk),
    ),
    "002 hostfile": lambda desk: (
        desk.script(MEASURE, HOSTFILE="hosts"),
        shows("scripts/profile_p2p.sh", "--hostfile hosts")(desk),
    ),
    "002 sh scripts/train_dist_random.sh": lambda desk: desk.script("scripts/train_dist_random.sh", shell="sh"),
}

# ---- 003: the search engine alone ----------------------------------------------------------------------------------


@line("003 computation json as printed", "003 layertype_T_bszB_seqS", "003 names of the computation files")
def _(desk: Desk) -> None:
    for name in ("computation_profiling_bf16_hidden_1024_head_16.json",):
        path = desk.folder / name
        path.write_text(json.dumps({"layertype_0_bsz8_seq512": 1.5, "layertype_1_bsz8_seq512": 2.5}))
        profile = ComputationProfile.load(path, "bf16", 1024, 16)
        assert profile.layer_ms[0][Shape(8, 512)] and profile.layer_ms[1][Shape(8, 512)]


@line("003 memory json as printed, with and without _sp", "003 parameter_size", "003 tp_activation_per_bsz_dict")
@line("003 checkpoint", "003 other_memory_pp_off", "003 other_memory_pp_on_first", "003 other_memory_pp_on_last")
@line("003 model_states", "003 activation", "003 names of the memory files")
def _(desk: Desk) -> None:
    path = next((desk.folder / "configs").glob("memory_*.json"))
    written = json.loads(path.read_text())
    del written["galvatron"]
    for keep in (lambda name: name.endswith("_sp"), lambda name: not name.endswith("_sp")):
        path.write_text(json.dumps({name: value for name, value in written.items() if keep(name)}))
        assert desk.plan()


@line("003 degree 1 alone under sequence parallelism")
def _(desk: Desk) -> None:
    path = next((desk.folder / "configs").glob("memory_*.json"))
    written = json.loads(path.read_text())
    for sequence in written["layertype_0_sp"].values():
        activation = sequence["tp_activation_per_bsz_dict"]
        sequence["tp_activation_per_bsz_dict"] = {name: activation[name] for name in ("1", "checkpoint")}
    path.write_text(json.dumps(written))
    assert desk.plan()


@line("003 allreduce_size_G_consec_C", "003 pp_size_N", "003 overlap_coe", "003 names of the hardware files")
@line("003 allreduce_size_G_MMB_time", "003 all2all_size_G_MMB_time")
def _(desk: Desk) -> None:
    folder = desk.folder / "hardware"
    folder.mkdir()
    files = {
        "allreduce_bandwidth_1nodes_4gpus_per_node.json": {
            "allreduce_size_4_consec_1": 150.0,
            "allreduce_size_2_consec_1": 140.0,
            "allreduce_size_2_consec_0": 130.0,
        },
        "p2p_bandwidth_1nodes_4gpus_per_node.json": {"pp_size_2": 100.0, "pp_size_4": 90.0},
        "overlap_coefficient.json": {"overlap_coe": 1.15},
        "sp_time_1nodes_4gpus_per_node.json": {
            "allreduce_size_4_1MB_time": 0.1,
            "allreduce_size_4_2MB_time": 0.2,
            "all2all_size_4_1MB_time": 0.05,
            "all2all_size_4_2MB_time": 0.1,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    read = HardwareProfile.load(1, 4, folder=folder)
    assert read.overlap_coe == 1.15 and read.allreduce_mib_per_ms[(2, False)] and read.p2p_mib_per_ms[4]
    assert len(read.messages_ms) == 2


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


@line("003 --output_config_path")
def _(desk: Desk) -> None:
    assert desk.plan(output_config_path="plan.json")


@pytest.mark.parametrize("name", CHECKS)
def test_a_documented_line_holds(desk, name):
    CHECKS[name](desk)


def test_lines_with_a_test_of_their_own_have_it():
    for name, where in SHOWN_BY.items():
        file, test = where.split("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), name
    assert not (CHECKS.keys() | SHOWN_BY.keys()) & EXCEPTIONS.keys()


def test_exceptions_are_reported(desk):
    assert "--mpi_path (ranks are started without MPI" in desk.command("profile", "hardware", "--mpi_path=/usr/mpi")
    assert "--backend (messages go through Paddle" in desk.command("profile", "hardware", "--backend=nccl")
    assert "shown as on GPUs" in desk.train("--use-flash-attn", global_train_batch_size=16, max_steps=1)
