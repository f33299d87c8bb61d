"""Every option that an error or a note names is one of the command that says it, or stands behind its own command."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddlenlp_galvatron
from paddlenlp_galvatron.cli.main import COMMANDS, commands
from paddlenlp_galvatron.options.aliases import canonical_name

pytest.importorskip("paddle")

ROOT = Path(paddlenlp_galvatron.__file__).parent
PLAN = ("plan diff", "plan scale", "plan spare", "plan trace")
ORIGIN = ("explain", "report", *PLAN)  # they price a plan's file
PROFILE = tuple(f"profile {part}" for part in ("computation", "memory", "model", "hardware", "all"))
# Part of the package, the longest first -> the commands that say its texts; none: all options stand behind theirs.
REPORTED_BY: dict[str, tuple[str, ...]] = {
    "check/calibration": ("calibrate",), "check/doctor": ("doctor",), "cli/convert.py": ("convert h2g", "convert g2h"),
    "cli/planning.py": ("search", "fit"), "cli/profile.py": PROFILE[:3], "check/validation": ("validate",),
    "cost_model": ("search", "fit", "what-if", *ORIGIN), "launch/processes.py": ("train", "parity"), "launch": (),
    "measure/nodes.py": ("train", *PROFILE), "measure": PROFILE, "model": (),
    "options/model_options.py": ("search", "train", "profile computation", "profile memory", "profile all"),
    "options/tuning.py": ("train",), "options/fleet.py": ("plan from-paddlefleet", "search"),
    "options/prices.py": ("search", "fit", "explain"), "options": (), "plan": (),
    "plan/export.py": ("plan to-paddlefleet",), "planner/fit.py": ("fit",), "planner/options.py": ("search", "fit"),
    "planner/assumptions.py": ("search", "fit"),
    "planner/origin.py": ORIGIN,
    "planner/question.py": ("search",),  # its folder of profiles is that of others, too
    "planner/scale.py": ("search",), "planner": (), "profiles": ("search", "fit", "what-if", *ORIGIN),
    "report/fit.py": ("fit",), "report": (), "runtime": ("train",), "training/data/corpus.py": ("data prepare",),
    "training/data/text_files.py": ("data prepare",), "training/data": ("train", "search", "fit"),
    "training": ("train",),
}  # fmt: skip
OTHERS = (  # of programs that are not ours, and of the program itself
    *("help", "version", "debug", "json", "ips", "config"),
    *("shm_size", "ulimit", "no_deps", "query_gpu", "format", "master", "nnodes", "nproc_per_node", "map_by"),
    *("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "bind_to", "ppn"),
    *("tasks_per_rs", "cpus"),
)
# Words for other commands, and help; examples have a test of their own.
ELSEWHERE = ("cli/main", "cli/command", "cli/examples", "cli/start", "options/aliases", "options/texts")
COMMAND = re.compile(r"galvatron ((?:convert|data|plan|profile) [a-z0-9-]+|[a-z-]+)")
OPTION = re.compile(r"--([a-zA-Z][\w-]*)")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Strings of a file with their lines, without docstrings; texts moved to JSON, too."""
    if path.suffix == ".json":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    tree, left_out = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and isinstance(node.body[0], ast.Expr):
            left_out |= {id(inner) for inner in ast.walk(node.body[0])}
        if isinstance(node, ast.JoinedStr) and id(node) not in left_out:
            left_out |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


def named() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Where an option is named, the option, and the commands that must have it."""
    for path in sorted((*ROOT.rglob("*.py"), *ROOT.rglob("*.json"))):
        part = path.relative_to(ROOT).as_posix()
        known = next(
            (REPORTED_BY[one] for one in sorted(REPORTED_BY, key=len, reverse=True) if part.startswith(one)), None
        )
        own = tuple(one for one in commands() if one.split()[0] == path.stem.replace("_", "-"))
        own = own if known is None else known
        for line, text in texts(path):
            for option in OPTION.finditer(text):
                before = list(COMMAND.finditer(text, 0, option.start()))
                behind = [one[1] for one in before if not re.search("[;,`]", text[one.end() : option.start()])]
                yield f"{part}:{line}: {text}", option[1].replace("-", "_"), tuple(behind[-1:]) or own


def test_remedies_name_options_that_the_command_has():
    faults, all_commands = [], commands()
    for where, option, reported_by in named():
        if option in OTHERS or "container" in where or where.startswith(ELSEWHERE):
            continue
        there = [one for one in all_commands if one in reported_by]
        fields = {one: all_commands[one].fields for one in there}
        lacking = [one for one in there if option != "list" and canonical_name(option, fields[one]) not in fields[one]]
        if lacking or not there:
            faults.append(f"--{option} in {', '.join(lacking) or 'no command'}: {where}")
    assert not faults, "\n".join(faults)


def test_examples_name_commands_and_their_options():
    from paddlenlp_galvatron.cli.help import EXAMPLES

    assert set(EXAMPLES) == {*commands()} and {words.split()[0] for words in EXAMPLES} == {*COMMANDS}
    for words, example in EXAMPLES.items():
        assert example.startswith(f"galvatron {words}")
        fields = commands()[words].fields
        for option in OPTION.findall(example):
            assert canonical_name(option, fields) in fields, example
