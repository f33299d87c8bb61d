"""The shell scripts: their commands, and that the search takes their files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import small_config

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.measure.nodes import options_of_hostfile
from paddlenlp_galvatron.profiles import HardwareProfile
from paddlenlp_galvatron.profiles.files import OVERLAP_NAME, allreduce_name, p2p_name, sp_time_name

ROOT = Path(__file__).parents[2]
PARTS = ("allreduce", "p2p", "allreduce_sp", "all2all", "overlap")
FILES = {
    "allreduce": allreduce_name(1, 4),
    "p2p": p2p_name(1, 4),
    "allreduce_sp": sp_time_name(1, 4),
    "all2all": sp_time_name(1, 4),
    "overlap": OVERLAP_NAME,
}


def run(script: Path, folder: Path, *words: str, **environment: str) -> str:
    """Run under sh from a folder; returns its output."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NUM_NODES", "NODE_RANK", "MPI_PATH")}
    ran = subprocess.run(
        ["sh", script, *words], cwd=folder, env=plain | environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def scripts(tmp_path) -> Path:
    return Path(shutil.copytree(ROOT / "llm/auto_parallel/galvatron/scripts", tmp_path / "my scripts"))


@pytest.fixture
def galvatron_program(tmp_path) -> str:
    program = tmp_path / "galvatron"
    start = "import sys; from paddlenlp_galvatron.cli.main import main; sys.exit(main())"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c '{start}' \"$@\"\n")
    program.chmod(0o755)
    return str(program)


def test_five_scripts_are_written_and_keep_what_they_were_written_with(tmp_path, scripts):
    run(scripts / "profile_hardware.sh", tmp_path, NUM_NODES="2", MASTER_ADDR="10.0.0.1", END_MB="64")
    for part in PARTS:
        stated = run(scripts / f"profile_{part}.sh", tmp_path, "--fresh", GALVATRON="echo", NODE_RANK="1")
        words = stated.split()
        assert words[:4] == ["profile", "hardware", "--parts", part]
        for name, value in {"num_nodes": "2", "node_rank": "1", "master_addr": "10.0.0.1", "end_mb": "64"}.items():
            assert words[words.index(f"--{name}") + 1] == value
        assert words[-1] == "--fresh"
    own = run(scripts / "profile_p2p.sh", tmp_path, GALVATRON="echo", NUM_NODES="4", PROFILE_HARDWARE_ARGS="--end_mb 2")
    assert "--num_nodes 4" in own and "--end_mb 2" in own and "start_mb" not in own


def test_scripts_leave_nodes_that_are_not_set_to_the_launcher(tmp_path, scripts):
    run(scripts / "profile_hardware.sh", tmp_path)
    for script in (scripts / "profile_p2p.sh", scripts / "profile_computation.sh", ROOT / "scripts" / "train_dist.sh"):
        words = run(script, tmp_path, GALVATRON="echo", MODEL_SIZE="llama3-8b").split()
        assert {words[words.index(f"--{name}") + 1] for name in ("num_nodes", "node_rank", "master_addr")} == {"None"}


@pytest.mark.parametrize("part", ["computation", "memory"])
def test_the_scripts_beside_paddlenlps_start_the_same(tmp_path, part):
    place = ROOT / "llm" / "auto_parallel" / "galvatron" / f"profile_{part}.sh"
    stated = run(place, tmp_path, "--fresh", GALVATRON="echo", MODEL_SIZE="llama3-8b")
    assert stated == run(
        ROOT / "scripts" / f"profile_{part}.sh", tmp_path, "--fresh", GALVATRON="echo", MODEL_SIZE="llama3-8b"
    )
    assert stated.startswith(f"profile {part} ") and "--model_size llama3-8b" in stated and stated.endswith("--fresh\n")


def test_what_means_nothing_here_is_named_in_a_note(tmp_path, scripts, galvatron_program):
    run(scripts / "profile_hardware.sh", tmp_path, MPI_PATH="/usr/local/mpi")
    ran = subprocess.run(
        ["sh", scripts / "profile_p2p.sh", "--analytic", "a100"],
        cwd=tmp_path,
        env=os.environ | {"GALVATRON": galvatron_program},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "no effect here: --mpi_path" in ran.stderr and "import-nccl-tests" in ran.stderr


def test_a_cluster_not_bought_yet_is_planned_from_its_data_sheet(tmp_path, scripts, galvatron_program):
    common = {"GALVATRON": galvatron_program, "ANALYTIC": "h100", "MODEL_SIZE": "llama3-8b", "SEQ_LENGTH": "4096"}
    for part in ("computation", "memory"):
        run(scripts / f"profile_{part}.sh", tmp_path, **common)
    run_hardware = ["profile", "hardware", "--analytic", "h100", "--num_nodes", "2"]
    subprocess.run([galvatron_program, *run_hardware], cwd=tmp_path, check=True, capture_output=True)
    variables = {"MEMORY": "72", "NUM_NODES": "2", "SETTLE_BSZ": "64"}
    stated = run(scripts / "search_dist.sh", tmp_path, "--json", **common, **variables)
    found = json.loads(stated.splitlines()[-1])
    assert found["feasible"] and 20 < found["throughput"] < 60  # samples/s: 25 to 75 % of the peak


@pytest.mark.slow
def test_the_default_chain_from_measuring_to_training(tmp_path, scripts, galvatron_program):
    """Every script in its turn, none given a number type: files, plan and training have the same one."""
    config = small_config(layers=4, hidden=64, inner=96, heads=8, vocab=256, length=64)
    (tmp_path / "small.json").write_text(json.dumps(config))
    common = {"GALVATRON": galvatron_program, "NUM_GPUS_PER_NODE": "4", "SEQ_LENGTH": "32"}
    run(scripts / "profile_hardware.sh", tmp_path, END_MB="1", **common)
    for part in PARTS:
        run(scripts / f"profile_{part}.sh", tmp_path, "--budget_ms", "0", **common)
        assert (tmp_path / "configs" / FILES[part]).exists()
    assert set(HardwareProfile.load(1, 4, folder=tmp_path / "configs").p2p_mib_per_ms) == {2, 4}
    model = {"MODEL_SIZE": str(tmp_path / "small.json"), "PROFILE_MAX_BATCH_SIZE": "4"}
    for part in ("computation", "memory"):
        run(scripts / f"profile_{part}.sh", tmp_path, "--budget_ms", "0", **common, **model)
    variables = {"MEMORY": "1", "TIME_PROFILE_MODE": "batch", "SETTLE_BSZ": "16"}
    stated = run(scripts / "search_dist.sh", tmp_path, "--json", **common, **model, **variables)
    found = json.loads(stated.splitlines()[-1])
    words = ("--timeout", "240", "--input_dir", "random")
    stated = run(ROOT / "scripts" / "train_dist.sh", tmp_path, *words, **common, **model, TRAIN_ITERS="2")
    assert f"plan: {found['plan']}, the newest in configs" in stated and "2 steps: loss" in stated
    plan = json.loads((tmp_path / found["plan"]).read_text())
    assert plan["galvatron"]["assumed"]["mixed_precision"] == "bf16" and plan["global_bsz"] == 16
    for kind in ("computation", "memory"):
        (file,) = (tmp_path / "configs").glob(f"{kind}_profiling_*.json")
        assert "_bf16_" in file.name


def test_a_hostfile_says_the_nodes(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("192.0.2.7 slots=8\n# a comment\n\n127.0.0.1 slots=8\n192.0.2.9\n")
    assert options_of_hostfile(hosts, {}) == {"num_nodes": 3, "master_addr": "192.0.2.7", "node_rank": 1}
    assert options_of_hostfile(hosts, {"num_nodes": "2", "node_rank": "0"})["node_rank"] == "0"
    for content, given, message in [
        ("", {}, "names no node"),
        ("192.0.2.7\n", {"num_nodes": "2"}, "names 1 nodes"),
        ("192.0.2.7\n192.0.2.8\n", {}, "--node_rank"),
    ]:
        hosts.write_text(content)
        with pytest.raises(UserError, match=message):
            options_of_hostfile(hosts, given)
