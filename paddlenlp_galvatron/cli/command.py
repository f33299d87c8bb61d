"""Commands: their options are fields of groups; `options/texts.json` describes each.

Dashes and underscores are the same. Aliases of an option work as well. A boolean takes no value, 0/1 or true/false.
`None` leaves an option unset. A mistake gives one line and exit code 2. Help, documentation and completion read
`Command`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from paddlenlp_galvatron.base import LARGEST_OPTIONS, UserError, read_yaml, within
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.options.aliases import did_you_mean
from paddlenlp_galvatron.options.foreign import Fate
from paddlenlp_galvatron.options.group import Options, as_given, canonical_options, is_boolean, read_options, read_words

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad input, 3 nothing feasible, 4 time ran out (gpu-check), "
    "130 Ctrl-C, 143 SIGTERM."
)
HELP = {"--help", "-h"}
LIST = "list"  # a switch with which arguments may be missing
JSON = ("json",)  # the switch of most commands
Work = Callable[..., int | None]


class FromFile(Options):
    """The group of a command that can read its options from a file."""

    config: Path | None = None


class Command:
    """Calls `work` with the options that were given, by canonical name; its docstring is the help.

    Options are unset by default: the fields of the groups have the defaults. `positional` (field -> its name in the
    help) are given as words, or by name; the last one takes several words if its name ends in `...`. `switches` are
    booleans of the command line alone; `work` gets them by keyword. `shared`: options of another
    command that scripts give to all, and what becomes of them here.
    """

    def __init__(
        self,
        work: Work,
        groups: Sequence[type[Options]],
        positional: Mapping[str, str],
        switches: Sequence[str],
        shared: Mapping[str, Fate],
    ):
        self.work, self.groups, self.positional, self.switches, self.shared = work, groups, positional, switches, shared
        self.help = " ".join((work.__doc__ or "").split())
        switch = {name: FieldInfo(annotation=bool, default=False) for name in switches}
        self.fields = (FromFile.model_fields if FromFile in groups else {}) | switch  # options and arguments
        self.panels: dict[str, str] = {}
        for group in groups:
            self.fields |= group.model_fields
            self.panels |= dict.fromkeys(group.model_fields, group.panel)
        self.is_boolean = {name: is_boolean(info) for name, info in self.fields.items()}

    @property
    def options(self) -> dict[str, FieldInfo]:
        """The options, without the arguments."""
        return {name: info for name, info in self.fields.items() if name not in self.positional}

    def text(self, name: str, language: str = "en") -> str:
        """The meaning of an option, argument or switch."""
        from paddlenlp_galvatron.options.texts import text_of  # imported here: only help needs it

        group = next((group for group in reversed(self.groups) if name in group.model_fields), None)
        return text_of(group or self.work, name, language)

    def run(self, words: Sequence[str], path: str) -> int:
        """Returns the exit code. `path`: the preceding words, such as `galvatron plan show`. Raises GalvatronError."""
        pairs, loose = read_words(words, self.is_boolean, say_note, self.shared)
        values: dict[str, Any] = {}
        for name, value in pairs:
            values[name] = [*values.get(name, ()), value] if self._takes_several(name) else value
        self._take_positional(values, loose, path)
        turned = {name: str(values.pop(name, "0")).lower() in ("1", "true") for name in self.switches}
        if config := values.pop("config", None):
            names = [name for name in self.fields if name != "config" and name not in self.switches]
            values = canonical_options(_options_in(Path(config), names), names, say_note, self.shared) | values
        for name, shown in self.positional.items():
            info = self.fields[name]
            if info.is_required() and name not in values and not turned.get(LIST):
                raise UserError(f"{shown}: missing ({self.text(name)}); name it behind the command")
        try:
            return self.work(values, **turned) or 0
        except UserError as error:
            raise UserError(as_given(fault, words, self.fields) for fault in error.faults) from None

    def _takes_several(self, name: str) -> bool:
        return self.positional.get(name, "").endswith("...")

    def _take_positional(self, values: dict[str, Any], loose: list[str], path: str) -> None:
        for name, shown in self.positional.items():
            if loose and self._takes_several(name):
                values[name], loose = [*values.get(name, ()), *loose], []
            elif loose and name in values:
                raise UserError(f"{shown}: given twice, also as --{name}")
            elif loose:
                values[name], *loose = loose
        if loose:
            commas = "; a list has commas, as in 8,16" * loose[0].isdigit()
            raise UserError(f"{loose[0]}: is one word too many{commas}; {path} --help says more")


def _options_in(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Options from a file: our own options, or a PaddleFleet recipe as options for the same job."""
    from paddlenlp_galvatron.options.fleet_fields import is_recipe, options_of  # here: few commands need it

    content = {} if path.suffix == ".json" else read_yaml(path, LARGEST_OPTIONS)
    if not is_recipe(content):
        return read_options(path)
    with within(str(path)):
        options, notes = options_of(content, names)
    for note in notes:
        say_note(note)
    return options


class App:
    """One top-level command (`search`), or a group of sub-commands with its own help (`plan show`, `plan check`)."""

    def __init__(self, help: str = ""):
        self.help = help
        self.commands: dict[str, Command] = {}  # by name; the only one of no group has none

    def command(
        self,
        *groups: type[Options],
        name: str = "",
        positional: Mapping[str, str] = {},
        switches: Sequence[str] = JSON,
        shared: Mapping[str, Fate] = {},
    ) -> Callable[[Work], Work]:
        """Adds the decorated function as a command; see `Command`. In a group it has the function's name."""

        def add(work: Work) -> Work:
            command_name = name or work.__name__.replace("_", "-") if self.help else ""
            self.commands[command_name] = Command(work, groups, positional, switches, shared)
            return work

        return add

    def find(self, words: Sequence[str], path: str) -> tuple[Command | None, Sequence[str], str]:
        """The command that the words behind `path` name, the words behind its name, and its path; no command where a
        group's own help is requested. Raises UserError."""
        if not self.help:
            return self.commands[""], words, path
        if not words:
            raise UserError(f"{path}: a command is missing; give one of {', '.join(self.commands)}")
        if words[0] in HELP:
            return None, words, path
        if words[0] not in self.commands:
            raise UserError(f"{path} {words[0]}: unknown command; {did_you_mean(words[0], self.commands)}")
        return self.commands[words[0]], words[1:], f"{path} {words[0]}"


def answer(text: str, as_json: bool, **values: Any) -> None:
    """Print the answer on stdout: text for people, or JSON for programs."""
    say(json.dumps(values, default=str) if as_json else text)


def say_note(note: str) -> None:
    """Print a note on stderr; stdout is for the command's answer."""
    say(f"note: {note}", err=True)
