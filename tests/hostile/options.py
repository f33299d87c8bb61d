"""Command lines: every option of every command that starts nothing, with values that it cannot have."""

from functools import cache

from plans import plan_fields

from paddlenlp_galvatron.cli.main import commands

from .case import Case, dump
from .configs import MODEL
from .profiles import SEARCH, sound

PLAN = dump(plan_fields(galvatron={"assumed": {"seq_length": 16}})).encode()
PRICED = tuple(f"--{name}={SEARCH[name]}" for name in ("profiles", "model_size") if name in SEARCH)
# A command that says all it needs and starts nothing: the changed options decide how it ends.
BASES: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("plan", "show"): (("plan.json",), ()),
    ("plan", "check"): (("plan.json",), ()),
    ("plan", "to-paddlenlp"): (("plan.json",), ()),
    ("plan", "uniform"): (
        ("--output=out.json", "--model_size=model.json", "--world_size=4", "--global_train_batch_size=8"),
        ("out.json",),
    ),
    ("plan", "schema"): ((), ()),
    ("plan", "diff"): (("plan.json", "plan.json", *PRICED), ()),
    ("plan", "trace"): (("plan.json", "--output=out.json", *PRICED), ("out.json",)),
    ("search",): (tuple(f"--{name}={value}" for name, value in SEARCH.items()), ("plan.json", "logs/")),
    ("fit",): (("model.json", "--gpus=1", "--seq=16"), ()),
    ("explain",): (("plan.json", *PRICED), ()),
    ("report",): (("plan.json", "--output=out.html", *PRICED), ("out.html",)),
    ("train",): (("plan.json", "--model=model.json", "--max_steps=1", "--dry_run"), ()),
    ("profile", "hardware"): (("--analytic=h100", "--output=out"), ("out/",)),
    ("profile", "computation"): (("--analytic=h100", "--output=out", "--model_size=model.json"), ("out/",)),
    ("profile", "memory"): (("--analytic=h100", "--output=out", "--model_size=model.json"), ("out/",)),
    ("profile", "model"): (("--analytic=h100", "--output=out", "--model_size=model.json"), ("out/",)),
    ("profile", "all"): (("--analytic=h100", "--output=out", "--model_size=model.json"), ("out/",)),
    ("profile", "import-nccl-tests"): (("missing.log", "--output=out"), ("out/",)),
    ("parity",): (("plan.json", "--nproc=3"), ()),
    ("convert", "h2g"): (("missing", "out"), ()),
    ("calibrate",): (("missing.csv", "--output=out.json"), ("out.json",)),
    ("convert", "g2h"): (("missing", "out"), ()),
    ("data", "prepare"): (("missing", "--output=out"), ()),
    ("validate",): (("model.json", "--count=0"), ()),
}
# doctor and gpu_check start programs, what-if and mcp serve until they are ended; tests of their own try them.
PROGRAMS = {"completion", "doctor", "gpu-check", "mcp", "what-if"}
# These name files to write, or programs to start: they may do so where the user says.
FREE = {"output", "output_config_path", "log_dir", "output_dir", "dry_run", "analytic", "nproc"}


@cache
def options_of(command: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a command's options."""
    return tuple(commands()[" ".join(command)].options)


def files() -> dict[str, bytes]:
    profiles = {f"configs/{name}": dump(content).encode() for name, content in sound().items()}
    example = dict(MODEL, hidden_size=64)
    return {"plan.json": PLAN, "model.json": dump(MODEL).encode(), "example.json": dump(example).encode(), **profiles}


def with_option(command: tuple[str, ...], name: str, value: str) -> Case:
    """A command that would do, but for one option."""
    base, writes = BASES[command]
    kept = [word for word in base if not word.startswith(f"--{name}=")]
    return Case((*command, *kept, f"--{name}={value}"), files(), writes)
