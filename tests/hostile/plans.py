"""Plan files for every command that reads one."""

from __future__ import annotations

from random import Random

from plans import plan_fields

from .case import Case
from .configs import MODEL
from .grammar import dump, json_file

GALVATRON = {
    "format_version": 1,
    "assumed": {"sequence_parallel": True, "mixed_precision": "bf16", "async_grad_reduce": True, "seq_length": 16},
    "predicted": {
        "time_s": 1.5,
        "lower_bound_s": 1.4,
        "stages": [{"time_s": 1.0, "memory_mib": 100.0, "memory": {"context_mib": 1.0, "states_mib": 60.0}}] * 2,
    },
    "searched_from": {
        "model": "small",
        "model_fingerprint": "0123456789abcdef",
        "cluster": {"nodes": 1},
        "profiles": [{"path": "profile.json", "sha256": "0" * 64, "fingerprint": {"device": "H100"}}],
    },
}
WITHOUT_ORIGIN = {name: value for name, value in GALVATRON.items() if name != "searched_from"}


def plan(random: Random) -> Case:
    command = random.choice(("show", "check", "to-paddlenlp", "train", "train", "parity"))
    ours = random.choice((GALVATRON, WITHOUT_ORIGIN, WITHOUT_ORIGIN))
    fields = plan_fields(galvatron=ours, **({"world_size": ...} if random.random() < 0.3 else {}))
    files = {"plan.json": json_file(fields, random), "model.json": dump(MODEL).encode()}
    model = ("--model", "model.json") if random.random() < 0.5 else ()
    if command == "train":
        words: tuple[str, ...] = ("train", "plan.json", "--model", "model.json", "--max_steps", "1", "--dry_run")
        return Case(words, files)
    if command == "parity":
        nproc = random.choice(("0", "-1", "3", "1e9", "nan", "65537"))  # no plan has these: nothing is started
        return Case(("parity", "plan.json", f"--nproc={nproc}"), files)
    return Case(("plan", command, "plan.json", *model), files)
