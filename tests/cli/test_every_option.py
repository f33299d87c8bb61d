"""Every option of every `--help`, on the command line and in a file, changes its field of the command's records alone.

Values are found by trying: a new option needs no row here, unless it needs others (`CONTEXTS`) or sets others (`SETS`).
`test_option_effects` and the tests of each feature show that the field is read afterwards.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.command import Command
from paddlenlp_galvatron.cli.main import commands

COMMANDS = commands()
VALUES = ("1", "0", "2", "3", "8", "300", "0.5", "x", "A=1", "h100-80gb", "dp+tp", "full")
# Options that must be given for others to be allowed.
SAVED = [{"save_gb_per_s": 1}, {"save_gb_per_s": 1, "mtbf_hours": 9}]
CONTEXTS: dict[str, list[dict[str, Any]]] = {
    "search": [*SAVED, {"device": "h100"}, {"task": "lora"}, {"max_bsz": 64, "settle_bsz": -1}, {"sp_space": "sp"}],
    "fit": [*SAVED, {"price_per_gpu_hour": 1}, {"task": "lora"}],
    "explain": SAVED,
    "validate": [{"task": "lora"}, {"num_nodes": 4, "master_addr": "10.0.0.1", "master_port": 9}],
    "train": [
        *({"task": task, "dataset_name_or_path": "x"} for task in ("sft", "lora")),
        {"task": "dpo", "train_dataset_path": "x"},
        {"task": "dpo", "dataset_name_or_path": "x"},
        {"dataset_name_or_path": "x"},
        {"train_dataset_path": "x"},
        {"load": "x"},
        {"recompute": 1},
    ],
    "plan uniform": [{"recompute": 1}],
    "completion": [{"shell": "bash"}],
}
# Options that also set others: the sides of a cluster give its size, a range of batches frees the one that is fixed.
CLUSTER, RANGE = {"num_nodes", "num_gpus_per_node", "world_size"}, {"min_bsz", "max_bsz", "settle_bsz"}
SETS = {"search": dict.fromkeys(CLUSTER, CLUSTER) | dict.fromkeys(RANGE, RANGE)}


def members(annotation: Any) -> Iterator[str]:
    """The words that a type takes."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(one.value) for one in annotation)
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for inner in get_args(annotation):
            yield from members(inner)


def record(command: Command, **values: Any) -> dict[str, Any]:
    """The fields of the groups that a command builds of a command line, and its switches. Raises UserError."""
    built: dict[str, Any] = {}

    def work(values: dict[str, Any], **switches: bool) -> None:
        for group in command.groups:
            built.update(dict(group.from_values(values)))
        built.update(switches)

    with patch.object(command, "work", work):
        command.run([f"--{name}={value}" for name, value in values.items()], "galvatron")
    return built


def contexts(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options with which others are tried, and their record: none but the required ones first."""
    command = COMMANDS[name]
    required = {
        field: next(members(info.annotation), "1") for field, info in command.fields.items() if info.is_required()
    }
    for context in ({}, *CONTEXTS.get(name, ())):
        with suppress(UserError):
            yield required | context, record(command, **required | context)


def tried(command: Command, option: str, context: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values that the option may have, each with its record."""
    for value in (*members(command.fields[option].annotation), *VALUES):
        with suppress(UserError):
            yield value, record(command, **context | {option: value})


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_changes_its_field_alone(name, tmp_path):
    command, file = COMMANDS[name], tmp_path / "options.json"
    known = list(contexts(name))
    for option in command.options.keys() - {"config"}:
        allowed = SETS.get(name, {}).get(option, {option})
        shown = next(
            (
                (value, context, after)
                for context, before in known
                for value, after in tried(command, option, context)
                if option in {field for field in after if after[field] != before[field]} <= allowed
            ),
            None,
        )
        assert shown, f"no value changes the field of --{option} alone: add what it needs to CONTEXTS"
        value, context, after = shown
        if "config" in command.fields and option not in command.switches:
            file.write_text(json.dumps({option: value}))
            others = {field: word for field, word in context.items() if field != option}
            assert record(command, config=file, **others) == after


def test_no_help_shows_what_is_not_meant_for_people(galvatron):
    for words in COMMANDS:
        shown = galvatron(*words.split(), "--help").out
        assert "Undefined" not in shown and "[[" not in shown and words.split()[-1] in shown


def test_the_help_says_what_kind_of_value_an_option_takes(galvatron):
    shown = galvatron("search", "--help").out
    kinds = {"top_k": "int", "memory_constraint": "float", "profiles": "path", "pipeline_type": "str"}
    assert all(f"--{option} <{kind}>" in shown for option, kind in kinds.items())
    assert "--disable_pp " in shown and "--disable_pp 0|1" not in shown and "--sequence_parallel 0|1" in shown
