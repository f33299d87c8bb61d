"""`galvatron completion`: words for the shell to complete, written once, so that no key waits for Python."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer

from paddlenlp_galvatron.base.printing import say

from .conventions import App
from .main import COMMANDS

app = App(help="Print what completes commands and options in your shell.")

BASH = """_galvatron() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}"
    [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}"
    local words
    case "$command" in
{cases}
        *) words="" ;;
    esac
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -z "$COMPREPLY" ] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _galvatron galvatron"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # zsh then takes what bash does


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish", metavar="SHELL")]) -> None:
    """Print what completes commands and options; for example in ~/.bashrc: source <(galvatron completion bash)."""
    words = _words()
    if shell is Shell.FISH:
        lines = ["complete -c galvatron -n __fish_use_subcommand -a '" + " ".join(COMMANDS) + "'"]
        for command, options in words.items():
            seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
            lines.append(f"complete -c galvatron -n '{seen}' -a '{' '.join(options)}'")
        say("\n".join(lines))
        return
    cases = []
    for command, options in sorted(words.items(), key=lambda pair: -pair[0].count(" ")):  # `plan show` before `plan`
        pattern = f'"{command}"*' if " " in command else f'"{command}"|"{command} "*'
        cases.append(f'        {pattern}) words="{" ".join(options)}" ;;')
    say((ZSH if shell is Shell.ZSH else "") + BASH.format(cases="\n".join(cases), commands=" ".join(COMMANDS)))


def _words() -> dict[str, list[str]]:
    """Commands, with those of groups -> their commands or options."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command: Any = typer.main.get_command(import_module(f".{name.replace('-', '_')}", __package__).app)
        if inner := getattr(command, "commands", None):
            found[name] = list(inner)
            found |= {f"{name} {sub}": _options(one) for sub, one in inner.items()}
        else:
            found[name] = _options(command)
    return found


def _options(command: Any) -> list[str]:
    return [max(one.opts, key=len) for one in command.params if one.opts[0].startswith("-")] + ["--help"]
