"""Every option of every `--help` shows that it changes something, in a row of the tables of `every_option`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from every_option import profile, search, small, train, validate
from every_option.row import Row, Seen, run

from paddlenlp_galvatron.cli.main import commands

TABLES = {
    command: (table.SEEN, table.BASES[command], rows, table.prepare)
    for table in (search, train, profile, small, validate)
    for command, rows in table.TABLES.items()
}
MOST_CANNOT = 6


def test_every_option_of_every_command_has_a_row():
    fields = {words: command.fields.keys() for words, command in commands().items() if command.fields}
    rows = {words: rows.keys() for words, (_, _, rows, _) in TABLES.items()}
    assert fields.keys() - {"completion"} == rows.keys()
    assert not {words: found for words in rows if (found := rows[words] - fields[words])}
    assert not {words: found for words in rows if (found := commands()[words].options.keys() - rows[words])}
    assert sum(bool(row.cannot) for _, _, rows, _ in TABLES.values() for row in rows.values()) <= MOST_CANNOT


class Runs:
    """Runs of commands, each made once, and a second time to find values that differ by themselves."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[Any, Seen] = {}
        self._templates: dict[Any, Path] = {}

    def seen(self, command: str, values: dict[str, Any], again: bool = False) -> Seen:
        key = command, again, *sorted((name, str(value)) for name, value in values.items() if value is not None)
        if key not in self._made:
            kind, _, _, prepare = TABLES[command]
            if prepare not in self._templates:
                self._templates[prepare] = self._folder / f"template{len(self._templates)}"
                self._templates[prepare].mkdir()
                prepare(self._templates[prepare])
            folder = self._folder / f"run{len(self._made)}"
            self._made[key] = run(command, values, self._templates[prepare], folder, kind)
        return self._made[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


ALL = [(command, option, row) for command, (_, _, rows, _) in TABLES.items() for option, row in rows.items()]


@pytest.mark.parametrize(
    ("command", "option", "row"),
    [pytest.param(*one, id=f"{one[0]} --{one[1]}") for one in ALL if not one[2].cannot],
)
def test_an_option_changes_what_its_row_says(runs, command, option, row: Row):
    without = TABLES[command][1] | row.beside | {option: None}
    reported = runs.seen(command, without), runs.seen(command, without | {option: row.value})
    again = runs.seen(command, without, again=True)
    before, after = (one.look(row.shows) for one in reported)
    assert again.look(row.shows) == before, "it differs by itself"
    assert (before == after) == bool(row.idle), f"{before}\n{after}\n{reported[1].err}"


def test_no_help_shows_what_is_not_meant_for_people(galvatron):
    for words in commands():
        shown = galvatron(*words.split(), "--help").out
        assert "Undefined" not in shown and "[[" not in shown and words.split()[-1] in shown


def test_the_help_says_what_kind_of_value_an_option_takes(galvatron):
    shown = galvatron("search", "--help").out
    kinds = {"top_k": "int", "memory_constraint": "float", "profiles": "path", "pipeline_type": "str"}
    assert all(f"--{option} <{kind}>" in shown for option, kind in kinds.items())
    assert "--disable_pp " in shown and "--disable_pp 0|1" not in shown and "--sequence_parallel 0|1" in shown
