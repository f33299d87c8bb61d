"""`galvatron completion`: a script with all completions, so that the Tab key does not start Python."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jinja2 import Template
from pydantic.fields import FieldInfo

from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.model import preset_names
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.profiles.data_sheet import data_sheets

from .command import App
from .main import COMMANDS, commands

app = App()

BASH = Path(__file__).with_name("completion.bash.jinja")
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh then uses bash's completions


class ShellOptions(Options):
    """The shell."""

    shell: Literal["bash", "zsh", "fish"]


@app.command(ShellOptions, positional={"shell": "SHELL"}, switches=())
def completion(values: dict[str, Any]) -> None:
    """Print a script that completes commands and options; in ~/.bashrc: source <(galvatron completion bash)."""
    shell = ShellOptions.from_values(values).shell
    if shell == "fish":
        say(f"complete -c galvatron -n __fish_use_subcommand -a '{' '.join(COMMANDS)}'")
        for command, names, words in _words():
            seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
            options = "".join(f" -l {name}" for name in names) + " -x" * bool(names)
            say(f"complete -c galvatron -n '{seen}'{options} -a '{' '.join(words)}'")
        return
    cases: dict[bool, list[str]] = {True: [], False: []}  # cases for option values (True) and options
    for command, names, words in sorted(_words(), key=lambda row: -row[0].count(" ")):  # `plan show` before `plan`
        pattern = f'"{command}"*' if " " in command else f'"{command}"|"{command} "*'
        pattern = "|".join(f'"{command}"*" --{name}"' for name in names) or pattern
        cases[bool(names)].append(f'        {pattern}) words="{" ".join(words)}" ;;')
    values_of, options_of = ("\n".join(cases[kind]) for kind in (True, False))
    template = Template(BASH.read_text())
    script = template.render(cases=options_of, values=values_of, commands=" ".join(COMMANDS))
    say((ZSH if shell == "zsh" else "") + script)


def _words() -> list[tuple[str, list[str], Sequence[str]]]:
    """Rows of a command, all names of an option, and the words that may follow: choices, data sheets, presets. Without
    names: the commands of a group, or a command's options and arguments."""
    groups: dict[str, list[str]] = {}
    rows: list[tuple[str, list[str], Sequence[str]]] = []
    for path, command in commands().items():
        name, _, sub = path.partition(" ")
        if sub:
            groups.setdefault(name, []).append(sub)
        options = [f"--{option}" for option in (*command.fields, "help")]
        rows.append((path, [], options + (preset_names() if "model_size" in command.positional else [])))
        for field, info in command.fields.items():
            if choices := _known(field, info):
                rows.append((path, [field, *other_names(field, command.fields)], choices))
    return [*((name, [], subs) for name, subs in groups.items()), *rows]


def _known(field: str, info: FieldInfo) -> Sequence[str]:
    if field == "model_size":
        return preset_names()
    kinds = [info.annotation, *get_args(info.annotation)]
    choices = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    choices += [str(member) for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for member in kind]
    return choices or (sorted(data_sheets()) if field == "device" else [])
