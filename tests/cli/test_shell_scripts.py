"""The shell scripts with a stand-in for their command: blocks as a whole, values as data, and where they run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LLM = ROOT / "llm" / "auto_parallel" / "galvatron"
HOSTILE = """a b '"$(touch X)`touch X`;touch X&* \\ end"""
HARDWARE = ("allreduce", "p2p", "allreduce_sp", "all2all", "overlap")
BLOCKS = {
    "scripts/search_dist.sh": ("ProfileDataParserArgs", "SearchEngineArgs"),
    "scripts/train_dist.sh": ("MODEL_ARGS", "TRAIN_ARGS", "CKPT_ARGS", "PARALLEL_ARGS", "DATA_ARGS"),
    "scripts/train_dist_random.sh": ("MODEL_ARGS", "TRAIN_ARGS", "CKPT_ARGS", "PARALLEL_ARGS"),
    "scripts/profile_computation.sh": ("MODEL_ARGS", "MODEL_PROFILER_ARGS"),
    "scripts/profile_memory.sh": ("MODEL_ARGS", "MODEL_PROFILER_ARGS"),
    "llm/auto_parallel/galvatron/train_qwen_fine_grained.sh": (
        "MODEL_ARGS",
        "TRAIN_ARGS",
        "CKPT_ARGS",
        "PARALLEL_ARGS",
    ),
    "llm/auto_parallel/galvatron/train_llama_fine_grained.sh": ("MODEL_ARGS", "DATA_ARGS", "CONFIG_ARGS"),
}
shells = pytest.mark.parametrize("shell", ["sh", "bash"])


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """Writes the words that it gets, one after a NUL."""
    program = tmp_path / "stand in"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.stdout.write(chr(0).join(sys.argv[1:]))\n")
    program.chmod(0o755)
    return program


def start(shell: str, script: Path, folder: Path, *words: str, **variables: str) -> list[str]:
    stand_in = str(folder / "stand in")
    environment = {"PATH": os.environ["PATH"], "GALVATRON": stand_in, "PYTHON": stand_in, **variables}
    ran = subprocess.run([shell, script, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not list(folder.rglob("X"))
    return ran.stdout.split("\0")


def value(words: list[str], option: str) -> str:
    return words[len(words) - 1 - words[::-1].index(option) + 1]


@shells
@pytest.mark.parametrize("script", BLOCKS)
def test_a_block_as_a_whole_stands_for_its_lines(stand_in, tmp_path, shell, script):
    usual = start(shell, ROOT / script, tmp_path)
    for block in BLOCKS[script]:
        words = start(shell, ROOT / script, tmp_path, "--last", "1", **{block: f"--own_{block}  *\n --flag"})
        at = words.index(f"--own_{block}")
        assert words[at : at + 3] == [f"--own_{block}", "*", "--flag"], "words, and no pattern of file names"
        assert words[-2:] == ["--last", "1"]
        replaced = {word for word in usual if word.startswith("--")} - set(words)
        assert replaced or block == "CONFIG_ARGS"


@shells
@pytest.mark.parametrize(
    ("script", "variable", "option"),
    [
        ("scripts/train_dist.sh", "MODEL_SIZE", "--model_size"),
        ("scripts/train_dist.sh", "DATA_PATH", "--data_path"),
        ("scripts/search_dist.sh", "MODEL_SIZE", "--model_size"),
        ("scripts/search_dist.sh", "PROFILES", "--profiles"),
        ("scripts/search_dist.sh", "MEMORY", "--memory_upper_limit"),
        ("scripts/search_dist.sh", "TIME_PROFILE_MODE", "--time_profile_mode"),
        ("scripts/search_dist.sh", "MEMORY_PROFILE_MODE", "--memory_profile_mode"),
        ("scripts/train_dist.sh", "NUM_NODES", "--num_nodes"),
        ("scripts/train_dist.sh", "NODE_RANK", "--node_rank"),
        ("scripts/profile_memory.sh", "PROFILE_MODE", "--profile_mode"),
        ("scripts/profile_memory.sh", "PROFILE_MAX_SEQ_LENGTH", "--profile_max_seq_length"),
        ("scripts/profile_memory.sh", "OUTPUT", "--output"),
        ("scripts/profile_computation.sh", "MASTER_ADDR", "--master_addr"),
        ("llm/auto_parallel/galvatron/train_qwen_fine_grained.sh", "MODEL", "--model_name_or_path"),
        ("llm/auto_parallel/galvatron/train_llama_fine_grained.sh", "OUTPUT_DIR", "--output_dir"),
    ],
)
def test_a_value_is_data(stand_in, tmp_path, shell, script, variable, option):
    assert value(start(shell, ROOT / script, tmp_path, **{variable: HOSTILE}), option) == HOSTILE


@shells
def test_what_profile_hardware_writes_holds_values_as_data(stand_in, tmp_path, shell):
    scripts = Path(shutil.copytree(LLM / "scripts", tmp_path / "my scripts"))
    variables = {"OUTPUT": HOSTILE, "MASTER_ADDR": HOSTILE, "launch": "python -m paddle.distributed.launch --gpus 0,1"}
    start(shell, scripts / "profile_hardware.sh", tmp_path, "--end_mb", HOSTILE, **variables)
    for part in HARDWARE:
        words = start(shell, scripts / f"profile_{part}.sh", tmp_path, "--last")
        for option in ("--output", "--master_addr", "--end_mb"):
            assert value(words, option) == HOSTILE
        assert value(words, "--launch") == variables["launch"]
        assert (value(words, "--num_nodes"), words[-1]) == ("None", "--last")
        own = start(shell, scripts / f"profile_{part}.sh", tmp_path, PROFILE_HARDWARE_ARGS="--end_mb 2", NUM_NODES="3")
        assert own[-2:] == ["--end_mb", "2"] and "--start_mb" not in own and value(own, "--num_nodes") == "3"
    assert not list(scripts.glob("*.part"))


def test_the_folder_beside_paddlenlps_scripts_stands_on_its_own(stand_in, tmp_path):
    copied = Path(shutil.copytree(LLM, tmp_path / "somewhere else"))
    for name in ("profile_computation", "profile_memory", "search_dist"):
        for place in (copied / f"{name}.sh", copied / "scripts" / f"{name}.sh"):
            words = start("bash", place, tmp_path, "--fresh", MODEL_SIZE="llama3-8b")
            assert value(words, "--model_size") == "llama3-8b" and words[-1] == "--fresh"
    start("bash", copied / "profile_hardware.sh", tmp_path)
    assert (copied / "scripts" / "profile_overlap.sh").exists()
    words = start("bash", copied / "train_llama_fine_grained.sh", tmp_path)
    assert words[0] == str(copied / "run_pretrain_galvatron.py") and value(words, "--model_name_or_path") == "llama2-7b"
    assert (LLM.parent / "galvatron-llama-submit").resolve() == LLM.resolve(), "the documents' name of it"


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_tools_has_the_conversions_of_the_documents(stand_in, tmp_path, model):
    for name, done in {f"{model}_h2g": "h2g", f"{model}_g2h": "g2h", model: "h2g"}.items():
        words = start("bash", ROOT / "tools" / f"convert_{name}.sh", tmp_path, INPUT_PATH=HOSTILE, OUTPUT_PATH="out")
        assert words[:4] == ["convert", done, HOSTILE, "out"]


@shells
def test_a_search_in_the_background_writes_its_log(stand_in, tmp_path, shell):
    stated = start(
        shell, ROOT / "scripts/search_dist.sh", tmp_path, BACKGROUND="1", MEMORY="36", MODEL_SIZE="a/b c.json"
    )
    assert stated == ["Search in background: Search_b c.json_36GB_1Nodes_8GPUs_per_node.log\n"]


def test_one_number_type_holds_from_the_profile_to_the_plan(stand_in, tmp_path):
    for name in ("profile_computation", "profile_memory", "search_dist"):
        assert value(start("sh", ROOT / "scripts" / f"{name}.sh", tmp_path), "--mixed_precision") == "bf16"
    assert value(start("sh", ROOT / "scripts" / "train_dist.sh", tmp_path), "--mixed_precision") == "None", "the plan's"
