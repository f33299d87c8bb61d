"""`galvatron completion`: words for the shell to complete, written once, so that no key waits for Python."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.options.group import Options

from .command import App
from .main import COMMANDS, commands

app = App()

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


class ShellOptions(Options):
    """The shell."""

    shell: Literal["bash", "zsh", "fish"] = Field(description="bash, zsh or fish")


@app.command(ShellOptions, positional={"shell": "SHELL"}, switches={})
def completion(values: dict[str, Any]) -> None:
    """Print what completes commands and options; for example in ~/.bashrc: source <(galvatron completion bash)."""
    shell = ShellOptions.from_values(values).shell
    words = _words()
    if shell == "fish":
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
    say((ZSH if shell == "zsh" else "") + BASH.format(cases="\n".join(cases), commands=" ".join(COMMANDS)))


def _words() -> dict[str, list[str]]:
    """Commands, with those of groups -> their commands or options."""
    found: dict[str, list[str]] = {}
    for words, command in commands().items():
        name, _, sub = words.partition(" ")
        if sub:
            found.setdefault(name, []).append(sub)
        found[words] = [f"--{option}" for option in (*command.fields, "help")]
    return found
