"""Logs of runs, as a report reads them."""

from __future__ import annotations

from random import Random

from . import options
from .case import Case
from .grammar import damaged, dump, mutated

NUMBERS = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "step_time_s": 0.5, "tokens_per_s": 1e3, "data_s": 0.0}


def log(random: Random) -> Case:
    lines = [{"step": step, **NUMBERS, "peak_memory_mib": [100.0] * 4} for step in range(random.choice((1, 2, 12)))]
    text = "".join(dump(mutated(line, random) if random.random() < 0.4 else line) + "\n" for line in lines)
    content = text.encode(errors="surrogatepass")
    files = {**options.files(), "log.jsonl": damaged(content, random) if random.random() < 0.3 else content}
    command, writes = options.BASES["report",]
    return Case(("report", *command, "--log=log.jsonl"), files, writes)
