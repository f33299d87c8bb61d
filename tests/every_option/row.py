"""A row of the tables, and the observation of a command that is run in this process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paddlenlp_galvatron.cli.main import main

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """An option with a value, and where that is seen: a dotted path of attributes and keys of `Seen`.

    `beside`: options of both runs, over those of the command's base. `idle`: nothing differs, and why that is right.
    `cannot`: why no quick run shows it.
    """

    value: Any
    shows: str = ""
    beside: Values = field(default_factory=dict)
    idle: str = ""
    cannot: str = ""

    def given(self, **beside: Any) -> Row:
        return replace(self, beside={**self.beside, **beside})


@dataclass
class Seen:
    """The results of a command."""

    folder: Path
    before: set[str]
    code: int
    out: str
    err: str
    environment: dict[str, str]  # variables that it set
    calls: dict[str, Any]  # noted by `watched`

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        """Notes calls that no output shows, and keeps processes from being started, while a command runs."""
        yield {}

    @property
    def refusal(self) -> str:
        return self.err if self.code == 2 else ""

    @property
    def notes(self) -> list[str]:
        return [line for line in f"{self.err}\n{self.out}".splitlines() if "note: " in line]

    @property
    def files(self) -> list[str]:
        """Written files."""
        return sorted(_files(self.folder) - self.before)

    @property
    def json(self) -> dict[str, Any]:
        """Every JSON file that was written, by its name."""
        return {name: json.loads((self.folder / name).read_text()) for name in self.files if name.endswith(".json")}

    def look(self, path: str) -> Any:
        """The value at a dotted path; None where a refused command has nothing there."""
        found: Any = self
        with chdir(self.folder):
            for name in path.split("."):
                if found is None:
                    return None
                found = found.get(name) if isinstance(found, dict) else getattr(found, name)
        return found


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def words_of(values: Values) -> list[str]:
    """A command line; None leaves an option out, a name in capitals is positional."""
    given = {name: value for name, value in values.items() if value is not None}
    positional = [str(value) for name, value in given.items() if name.isupper()]
    return positional + [f"--{name}={value}" for name, value in given.items() if not name.isupper()]


def run(command: str, values: Values, template: Path, folder: Path, kind: type[Seen] = Seen) -> Seen:
    """A command in a copy of a folder of files."""
    shutil.copytree(template, folder)
    before, was = _files(folder), dict(os.environ)
    with (
        patch.dict(os.environ),
        chdir(folder),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        kind.watched() as calls,
    ):
        code = main([*command.split(), *words_of(values)])
        changed = {name: value for name, value in os.environ.items() if was.get(name) != value}
    return kind(folder, before, code, out.getvalue(), err.getvalue(), changed, calls)
