"""Logs of runs, as a report reads them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from random import Random

from cost_examples import MODEL
from plans import plan_fields

from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.plan import Plan, plan_id, read_plan

from .case import Case
from .grammar import damaged, dump, mutated
from .profiles import sound

NUMBERS = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "step_time_s": 0.5, "tokens_per_s": 1e3, "data_s": 0.0}


PLAN = dump(plan_fields(galvatron={"assumed": {"seq_length": 512, "mixed_precision": "bf16"}})).encode()


@cache
def plan() -> Plan:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(PLAN)
        return read_plan(file.name)


def step_log(random: Random) -> Case:
    always = {**NUMBERS, "plan": plan_id(plan()), "peak_memory_mib": [100.0] * plan().world_size}
    lines = [{"step": step, **always} for step in range(random.choice((1, 2, 12)))]
    text = "".join(dump(mutated(line, random) if random.random() < 0.4 else line) + "\n" for line in lines)
    content = text.encode(errors="surrogatepass")
    log = damaged(content, random) if random.random() < 0.3 else content
    files = {f"configs/{name}": dump(profile).encode() for name, profile in sound().items()}
    files |= {"plan.json": PLAN, "example.json": dump(config_of(MODEL)).encode(), "log.jsonl": log}
    priced = ("--profiles=configs", "--model=example.json", "--memory_constraint=8", "--num_gpus_per_node=4")
    return Case(("report", "plan.json", "--log=log.jsonl", "--output=out.html", *priced), files, writes=("out.html",))
