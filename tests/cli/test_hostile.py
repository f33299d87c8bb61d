"""Command lines and files that nobody means well with end a command with one line a fault, in bounded memory, and leave
nothing behind. `make test-full` tries every option of every command."""

import json
import resource
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY
from plans import plan_fields
from small_model import GROUPED_MODEL

from paddlenlp_galvatron.cli.main import COMMANDS, commands
from paddlenlp_galvatron.launch import processes

MEMORY_BYTES = 500 * 2**20  # beyond the process's when the case begins
BEGINNINGS = ("error: ", "note: ", "warning: ")
LONGEST = 2100  # characters of a line
SHEET = Path(__file__).parents[2] / "configs/nodes/h100-80gb.json"
ESCAPES = "\x1b]0;title\x07\x1b[2J"
# Values that no number, name or path of an option should have.
WRONG = ("inf", "nan", "-1", "0", "1e30", "1" + "0" * 400, "", ESCAPES)
MODEL = GROUPED_MODEL | {"num_hidden_layers": 4, "vocab_size": 1001, "max_position_embeddings": 128}
SEARCH = (
    *("--model_size=example.json", "--num_nodes=2", "--num_gpus_per_node=4", "--memory_constraint=8"),
    *("--settle_bsz=16", "--settle_chunk=2", "--seq_length=512", "--max_pp_deg=2", "--effort=1000"),
    "--output_config_path=plan.json",
)
PRICED = ("--model_size=example.json",)
DERIVED = ("--analytic=h100", "--output=out")
UNIFORM = ("--output=out.json", "--model_size=model.json", "--world_size=4", "--global_train_batch_size=8")
# A command that says all it needs and starts nothing, and the beginnings of names that it may write.
BASES: dict[str, tuple[tuple[str, ...], str]] = {
    "plan show": (("plan.json",), "\0"),
    "plan check": (("plan.json",), "\0"),
    "plan to-paddlenlp": (("plan.json",), "\0"),
    "plan uniform": (UNIFORM, "out.json"),
    "plan schema": ((), "\0"),
    "plan diff": (("plan.json", "plan.json", *PRICED), "\0"),
    "plan trace": (("plan.json", "--output=out.json", *PRICED), "out.json"),
    "search": (SEARCH, "plan.json"),
    "fit": (("model.json", "--gpus=1", "--seq=16"), "\0"),
    "explain": (("plan.json", *PRICED), "\0"),
    "report": (("plan.json", "--output=out.html", *PRICED), "out.html"),
    "train": (("plan.json", "--model=model.json", "--max_steps=1", "--dry_run"), "\0"),
    "profile hardware": (DERIVED, "out/"),
    **{f"profile {what}": ((*DERIVED, "--model_size=model.json"), "out/") for what in ("computation", "memory")},
    **{f"profile {what}": ((*DERIVED, "--model_size=model.json"), "out/") for what in ("model", "all")},
    "profile import-nccl-tests": (("missing.log", "--output=out"), "out/"),
    "parity": (("plan.json", "--nproc=3"), "\0"),
    "convert h2g": (("missing", "out"), "\0"),
    "calibrate": (("missing.csv", "--output=out.json"), "out.json"),
    "convert g2h": (("missing", "out"), "\0"),
    "data prepare": (("missing", "--output=out"), "\0"),
    "validate": (("model.json", "--count=0"), "\0"),
}
# doctor and gpu-check start programs, what-if and mcp serve until they are ended; tests of their own try them.
PROGRAMS = {"completion", "doctor", "gpu-check", "mcp", "what-if"}
# These name files to write, or programs to start: they may do so where the user says.
FREE = {"output", "output_config_path", "log_dir", "output_dir", "dry_run", "analytic", "nproc"}


class Case(NamedTuple):
    words: tuple[str, ...]
    says: str = ""  # text of an error
    files: Mapping[str, bytes] = {}
    writes: str = "\0"


@cache
def sound(folder: Path) -> dict[str, bytes]:
    """Profiles of a small cluster, a plan and two models."""
    for profile in (HARDWARE, COMPUTATION, MEMORY):
        profile.save(folder)
    profiles = {f"configs/{path.name}": path.read_bytes() for path in folder.glob("*.json")}
    plan = plan_fields(galvatron={"assumed": {"seq_length": 16}})
    files = {"plan.json": plan, "model.json": MODEL, "example.json": MODEL | {"hidden_size": 64}}
    return profiles | {name: json.dumps(content).encode() for name, content in files.items()}


def with_option(command: str, name: str, value: str, says: str = "") -> Case:
    """A command that would do, but for one option."""
    words, writes = BASES[command]
    kept = [word for word in words if not word.startswith(f"--{name}=")]
    return Case((*command.split(), *kept, f"--{name}={value}"), says, writes=writes)


def plan(says: str, **changed: Any) -> Case:
    files = {"plan.json": json.dumps(plan_fields(**changed)).encode()}
    return Case(("plan", "check", "plan.json", "--model", "model.json"), says, files)


def assumed(**predicted: Any) -> dict[str, Any]:
    numbers = {"sequence_parallel": True, "mixed_precision": "bf16", "async_grad_reduce": True, "seq_length": 16}
    return {"format_version": 1, "assumed": numbers, **predicted}


def model(says: str, **changed: Any) -> Case:
    words = ("plan", "uniform", *UNIFORM[:1], "--model_size=config.json", *UNIFORM[2:])
    return Case(words, says, {"config.json": json.dumps(MODEL | changed).encode()})


def sheet(name: str, value: float) -> Case:
    content = json.loads(SHEET.read_text())
    content[name]["value"] = value
    words = ("fit", "llama3.2-1b", "--gpus=8", "--device=sheet.json")
    return Case(words, f"sheet.json: {name}.value: ", {"sheet.json": json.dumps(content).encode()})


MANY_DEGREES = plan(  # whose least common multiple has more digits than Python prints
    "no world of up to 65536 ranks fits all these degrees",
    **{"world_size": ..., "pp_division": "4500,4499", "tp_sizes_enc": ",".join(map(str, range(1, 9_000)))},
    **dict.fromkeys(("tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint"), ",".join(["0"] * 8_999)),
)
LOG = """#  Rank  0 Group  0 Pid   2748 on      host device  0 [0x01] NVIDIA H100
#  Rank  1 Group  0 Pid   2749 on      host device  1 [0x02] NVIDIA H100
     1048576        262144     float     sum      -1    inf   20.00   20.00      0    52.43   20.00   20.00      0
"""
IMPORT = ("profile", "import-nccl-tests", "all_reduce_perf.log", "--num_gpus_per_node=2", "--output=out")
NODE = json.dumps(json.loads(SHEET.read_text()) | {"gpus_per_node": 10**19}).encode()
HOSTS = ("profile", "hardware", "--hostfile=hosts", "--analytic=h100", "--output=out")
TEXT = ("data", "prepare", "text.txt", "--vocab_size=300", "--output=/")
KNOWN = {  # each crashed or hung a command once, filled its memory, or was taken though nobody can mean it
    "an infinite rate": with_option("train", "learning_rate", "inf", "learning_rate"),
    "infinite epochs": with_option("train", "num_train_epochs", "inf", "num_train_epochs"),
    "a seed of 33 bits": with_option("train", "seed", "4294967296", "seed"),
    "a timeout of nan": with_option("parity", "timeout", "nan", "timeout"),
    "a batch of 3e9": with_option("search", "settle_bsz", "3000000000", "settle_bsz"),
    "a batch in powers of ten": with_option("search", "settle_bsz", "1e30", "settle_bsz"),
    "2^31 - 1 chunks": with_option("search", "settle_chunk", "2147483647", "settle_chunk"),
    "nodes that are no number": with_option("profile hardware", "num_nodes", "x", "num_nodes"),
    "a vocabulary of 10^12": with_option("data prepare", "vocab_size", "1000000000000", "vocab_size"),
    "a world of 10^9": plan("world_size: must be at most 65536", world_size=10**9),
    "many degrees": MANY_DEGREES,
    "a long list": plan("use_sp: has 2,000,001 characters", use_sp="1," * 10**6 + "1"),
    "half a character": plan("one half of a character", default_dp_type="\ud800"),
    "escapes": plan("pipeline_type: ", pipeline_type=ESCAPES),
    **{
        f"predicted {predicted}": plan("galvatron.predicted", galvatron=assumed(predicted=predicted))
        for predicted in (7, [1], {"time_s": "x"}, {"stages": 7}, {"stages": [{"memory": [1]}]}, {"stages": [[1]]})
    },
    "10^14 layers as a float": model("num_hidden_layers is 100000000000000.0", num_hidden_layers=1e14),
    "10^14 layers": model("num_hidden_layers is 100000000000000; give a whole number", num_hidden_layers=10**14),
    "a word as scaling": model("rope_scaling is linear", rope_scaling="linear"),
    "options in knots": Case(
        ("plan", "uniform", *UNIFORM, "--config=options.yaml"), "repeats", {"options.yaml": b"a: &a [x]\nb: [*a,*a]"}
    ),
    "an option of escapes": Case(
        ("plan", "uniform", *UNIFORM[1:], "--config=options.yaml"), "", {"options.yaml": rb'output: "\e]0;x\a"'}, "\x1b"
    ),
    "a log of infinite times": Case(IMPORT, "all_reduce_perf.log: ", {"all_reduce_perf.log": LOG.encode()}),
    "10^19 devices": Case(
        ("profile", "hardware", "--analytic", "sheet.json", "--output=out"), "gpus_per_node", {"sheet.json": NODE}
    ),
    "a tiny bandwidth": sheet("memory_bandwidth", 5e-324),
    "a tiny efficiency": sheet("matmul_efficiency", 1e-308),
    "a huge network": sheet("network", 1e300),
    "a binary hostfile": Case(HOSTS, "hosts: cannot be read", {"hosts": bytes(range(128, 256))}),
    "a path that no file can have": Case(("plan", "show", "x" * 300), "File name too long"),
    "a data set without a name": Case(TEXT, "/: is a folder", {"text.txt": b"a cat"}),
}


@pytest.fixture
def check(galvatron, monkeypatch, tmp_path, tmp_path_factory):
    """Runs a case in an empty folder, and asserts how it ends."""

    def nothing_is_started(*_: object, **__: object):
        raise AssertionError("the case starts a process")

    def run(case: Case, number: int = 0) -> None:
        place = tmp_path / str(number)
        files = sound(profiles) | case.files
        for name, content in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        monkeypatch.chdir(place)
        limits, used = resource.getrlimit(resource.RLIMIT_DATA), Path("/proc/self/status").read_text()
        kib = int(used.partition("VmData:")[2].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * kib + MEMORY_BYTES, limits[1]))
        try:
            ran = galvatron(*case.words)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        lines = ran.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert ran.code in (0, 2, 3) and bool(errors) == (ran.code != 0), (case.words, ran)
        assert len(set(errors)) == len(errors) and case.says in "\n".join(errors), (case.words, ran)
        assert all(line.startswith(BEGINNINGS) and "Error:" not in line for line in lines), (case.words, ran)
        assert "error: unexpected " not in ran.err and max(map(len, [*lines, ""])) <= LONGEST, (case.words, ran)
        assert all(char.isprintable() or char == "\n" for char in ran.out + ran.err), (case.words, ran)
        left = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        changed = {name for name in left.keys() | files if left.get(name) != files.get(name)}
        writes = ("logs/",) if ran.code else ("logs/", case.writes)
        assert all(name.startswith(writes) for name in changed), (case.words, changed)

    profiles = tmp_path_factory.getbasetemp() / "profiles"
    profiles.mkdir(exist_ok=True)
    monkeypatch.setattr(processes, "begin_process", nothing_is_started)
    return run


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_once_taken_or_broke_a_command_is_refused(name, check):
    check(KNOWN[name])


@pytest.mark.slow
@pytest.mark.parametrize("command", BASES)
def test_every_option_of_every_command_bears_every_wrong_value(command, check):
    names = [name for name in commands()[command].options if name not in FREE]
    for number, (name, value) in enumerate((name, value) for name in names for value in WRONG):
        check(with_option(command, name, value), number)


def test_every_command_is_tried():
    """A command that is new stands in the table of those that are tried."""
    assert {command.split()[0] for command in BASES} == set(COMMANDS) - PROGRAMS
