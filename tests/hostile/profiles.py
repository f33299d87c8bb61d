"""Profile files, data sheets and logs of nccl-tests."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL

from paddlenlp_galvatron.model import config_of

from .case import Case
from .grammar import damaged, dump, json_file

SEARCH = {
    "model_size": "example.json",
    "num_nodes": 2,
    "num_gpus_per_node": 4,
    "memory_constraint": 8,
    "settle_bsz": 16,
    "settle_chunk": 2,
    "seq_length": 512,
    "max_pp_deg": 2,
    "effort": 1000,
    "output_config_path": "plan.json",
}
LOG = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 2097152 step: 2(factor) all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid   2748 on      host device  0 [0x01] NVIDIA H100
#  Rank  1 Group  0 Pid   2749 on      host device  1 [0x02] NVIDIA H100
     1048576        262144     float     sum      -1    52.43   20.00   20.00      0    52.43   20.00   20.00      0
     2097152        524288     float     sum      -1    104.9   20.00   20.00      0    104.9   20.00   20.00      0
"""


@cache
def sound() -> dict[str, Any]:
    """The content of each file of a small cluster's profiles, and of a data sheet."""
    with tempfile.TemporaryDirectory() as folder:
        for profile in (HARDWARE, COMPUTATION, MEMORY):
            profile.save(Path(folder))
        return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}


def profile(random: Random) -> Case:
    broken = random.choice(list(sound()))
    files = {f"configs/{name}": dump(content).encode() for name, content in sound().items()}
    files[f"configs/{broken}"] = json_file(sound()[broken], random)
    files["example.json"] = dump(config_of(MODEL)).encode()
    return Case(
        ("search", *(f"--{name}={value}" for name, value in SEARCH.items())), files, writes=("plan.json", "logs/")
    )


def data_sheet(random: Random) -> Case:
    known = json.loads((Path(__file__).parents[2] / "configs/nodes/h100-80gb.json").read_text())
    derived = ("profile", "hardware", "--analytic", "sheet.json", "--output", "out")
    words = random.choice([derived, ("fit", "llama3.2-1b", "--gpus", "8", "--device", "sheet.json")])
    return Case(words, {"sheet.json": json_file(known, random)}, writes=("out/",))


def nccl_log(random: Random) -> Case:
    numbers = ["inf", "nan", "-1", "0", "1e999", "9" * 400, "1e-320", "", "x", "\x1b[2J", "1048576", "20.00"]
    words = LOG.split(" ")
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        words[random.randrange(len(words))] = random.choice(numbers)
    text = damaged(" ".join(words).encode(), random)
    flags = ("--num_nodes", random.choice(("1", "1", "2", "x")), "--num_gpus_per_node", random.choice(("2", "2", "0")))
    words = ("profile", "import-nccl-tests", "all_reduce_perf.log", *flags, "--output", "out")
    return Case(tuple(words), {"all_reduce_perf.log": text}, writes=("out/",))
