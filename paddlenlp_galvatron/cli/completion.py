"""`galvatron completion`: words for the shell to complete, written once, so that no key waits for Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.model import preset_names
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.profiles.data_sheet import data_sheets

from .command import App
from .main import COMMANDS, commands

app = App()

BASH = """_galvatron() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}"
    local words
    case "$command $before" in
{values}
        *) words="" ;;
    esac
    [ -z "$words" ] && case "$command" in
{cases}
        *) words="" ;;
    esac
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -z "$COMPREPLY" ] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _galvatron galvatron"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh then takes bash's completions


class ShellOptions(Options):
    """The shell."""

    shell: Literal["bash", "zsh", "fish"]


@app.command(ShellOptions, positional={"shell": "SHELL"}, switches=())
def completion(values: dict[str, Any]) -> None:
    """Print a script that completes commands and options; in ~/.bashrc: source <(galvatron completion bash)."""
    shell = ShellOptions.from_values(values).shell
    words = _words()
    if shell == "fish":
        lines = ["complete -c galvatron -n __fish_use_subcommand -a '" + " ".join(COMMANDS) + "'"]
        for command, options in words.items():
            seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
            lines.append(f"complete -c galvatron -n '{seen}' -a '{' '.join(options)}'")
        for command, names, known in _values():
            seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
            longs = " ".join(f"-l {name}" for name in names)
            lines.append(f"complete -c galvatron -n '{seen}' {longs} -x -a '{' '.join(known)}'")
        say("\n".join(lines))
        return
    cases = []
    for command, options in sorted(words.items(), key=lambda pair: -pair[0].count(" ")):  # `plan show` before `plan`
        pattern = f'"{command}"*' if " " in command else f'"{command}"|"{command} "*'
        cases.append(f'        {pattern}) words="{" ".join(options)}" ;;')
    cases_of_values = []
    for command, names, known in _values():
        patterns = "|".join(f'"{command}"*" --{name}"' for name in names)
        cases_of_values.append(f'        {patterns}) words="{" ".join(known)}" ;;')
    script = BASH.format(cases="\n".join(cases), values="\n".join(cases_of_values), commands=" ".join(COMMANDS))
    say((ZSH if shell == "zsh" else "") + script)


def _words() -> dict[str, list[str]]:
    """Commands, with those of groups -> their commands, or their options and arguments."""
    found: dict[str, list[str]] = {}
    for words, command in commands().items():
        name, _, sub = words.partition(" ")
        if sub:
            found.setdefault(name, []).append(sub)
        found[words] = [f"--{option}" for option in (*command.fields, "help")]
        found[words] += preset_names() if "model_size" in command.positional else []
    return found


def _values() -> Iterator[tuple[str, list[str], Sequence[str]]]:
    """Command, all names of an option, and the values that are known: choices, data sheets, presets."""
    for words, command in commands().items():
        for field, info in command.fields.items():
            if known := _known(field, info):
                yield words, [field, *other_names(field, command.fields)], known


def _known(field: str, info: FieldInfo) -> Sequence[str]:
    if field == "model_size":
        return preset_names()
    kinds = [info.annotation, *get_args(info.annotation)]
    choices = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    choices += [str(one) for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for one in kind]
    return choices or (sorted(data_sheets()) if field == "device" else [])
