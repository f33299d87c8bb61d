"""Inputs that once crashed or hung a command, filled its memory, or were taken though nobody can mean them: a case
each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from plans import plan_fields

from . import configs, options, profiles
from .case import ESCAPES, Case, Raw, dump

LONG = "x" * 300
ASSUMED = {"sequence_parallel": True, "mixed_precision": "bf16", "async_grad_reduce": True, "seq_length": 16}
OURS: dict[str, Any] = {"format_version": 1, "assumed": ASSUMED}
SHEET = Path(__file__).parents[2] / "configs/nodes/h100-80gb.json"
OPTIONS = [  # a command that would do but for this option
    (("train",), "learning_rate", "inf"),
    (("train",), "num_train_epochs", "inf"),
    (("train",), "seed", "4294967296"),
    (("parity",), "timeout", "nan"),
    (("search",), "settle_bsz", "3000000000"),
    (("search",), "settle_bsz", "1e30"),
    (("search",), "settle_chunk", "2147483647"),
    (("profile", "hardware"), "num_nodes", "x"),
    (("data", "prepare"), "vocab_size", "1000000000000"),
]
PLANS: list[tuple[dict[str, Any], str]] = [  # fields of a plan that would do, and the expected error
    ({"world_size": 10**9}, "world_size: must be at most 65536"),
    # Whose least common multiple has more digits than Python prints.
    (
        {"world_size": ..., "pp_division": "4500,4499", "tp_sizes_enc": ",".join(map(str, range(1, 9_000)))}
        | dict.fromkeys(("tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint"), ",".join(["0"] * 8_999)),
        "no world of up to 65536 ranks fits all these degrees",
    ),
    ({"use_sp": "1," * 10**6 + "1"}, "use_sp: has 2,000,001 characters"),
    ({"default_dp_type": Raw('"\\ud800"')}, "one half of a character"),
    ({"pipeline_type": ESCAPES}, "pipeline_type: "),
    *(
        ({"galvatron": OURS | {"predicted": predicted}}, "galvatron.predicted")
        for predicted in (7, [1], {"time_s": "x"}, {"stages": 7}, {"stages": [{"memory": [1]}]})
    ),
    ({"galvatron": OURS | {"predicted": {"stages": [[1]]}}}, "galvatron.predicted.stages: stage 0: must be an object"),
    ({"galvatron": {"predicted": Raw("[" * 1000 + "]" * 1000)}}, "within one another"),
]
MODELS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 1e14}, "num_hidden_layers is 100000000000000.0"),
    ({"num_hidden_layers": 10**14}, "num_hidden_layers is 100000000000000; give a whole number"),
    ({"rope_scaling": "linear"}, "rope_scaling is linear"),
]


def known() -> dict[str, Case]:
    found = {
        f"{' '.join(command)} --{name}={value}": replace(options.with_option(command, name, value), says=name)
        for command, name, value in OPTIONS
    }
    for number, (fields, says) in enumerate(PLANS):
        files = {"plan.json": dump(plan_fields(**fields)).encode(), "model.json": dump(configs.MODEL).encode()}
        words = ("plan", "check", "plan.json", "--model", "model.json")
        found[f"plan {number}: {says}"] = Case(words, files, says=says)
    for changed, says in MODELS:
        files = {"config.json": json.dumps(configs.MODEL | changed).encode()}
        words = (*configs.UNIFORM, "--model_size=config.json", "--world_size=4", "--global_train_batch_size=8")
        found[f"a model: {says}"] = Case(words, files, says=says)
    for number, knot in enumerate(configs.KNOTS):
        files = {"options.yaml": knot.encode(errors="surrogatepass")}
        found[f"YAML {number}"] = Case((*configs.UNIFORM, "--config", "options.yaml"), files)
    log = profiles.LOG.replace("52.43", "inf").encode()
    imported = ("profile", "import-nccl-tests", "all_reduce_perf.log", "--num_gpus_per_node=2", "--output=out")
    found["a log of infinite times"] = Case(imported, {"all_reduce_perf.log": log}, says="all_reduce_perf.log: ")
    sheet = json.loads(SHEET.read_text()) | {"gpus_per_node": 10**19}
    derived = ("profile", "hardware", "--analytic", "sheet.json", "--output=out")
    found["a node of 10^19 devices"] = Case(derived, {"sheet.json": json.dumps(sheet).encode()}, says="gpus_per_node")
    for name, value in (("memory_bandwidth", 5e-324), ("matmul_efficiency", 1e-308), ("network", 1e300)):
        sheet = json.loads(SHEET.read_text())
        sheet[name]["value"] = value
        fitted = ("fit", "llama3.2-1b", "--gpus=8", "--device=sheet.json")
        files = {"sheet.json": json.dumps(sheet).encode()}
        found[f"a sheet's {name} of {value}"] = Case(fitted, files, says=f"sheet.json: {name}.value: ")
    hosts = ("profile", "hardware", "--hostfile=hosts", "--analytic=h100", "--output=out")
    found["a binary hostfile"] = Case(hosts, {"hosts": bytes(range(128, 256))}, says="hosts: cannot be read")
    found["a path that no file can have"] = Case(("plan", "show", LONG), {}, says="File name too long")
    prepared = ("data", "prepare", "text.txt", "--vocab_size=300", "--output=/")
    found["a data set without a name"] = Case(prepared, {"text.txt": b"a cat"}, says="/: is a folder")
    return found
