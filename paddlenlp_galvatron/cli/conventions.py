"""Conventions for the options of every command.

Dashes and underscores are the same. An option answers to its aliases. A boolean takes nothing, 0/1 or true/false.
`None` leaves an option unset. A mistake is one line and exit code 2. A command has all this by being made with `App`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.interop.aliases import canonical_name, did_you_mean
from paddlenlp_galvatron.options.canonical import canonical_words
from paddlenlp_galvatron.options.group import in_words

HELP = {"--help", "-h"}
INTERRUPTED = 130  # typer's exit code of a Ctrl-C

F = TypeVar("F", bound=Callable[..., Any])


class App(typer.Typer):
    """A command, or a group of commands where it has more than one, whose options follow the conventions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None, cls=CommandGroup, **settings)

    def command(self, name: str | None = None, beside: Mapping[str, str] = {}, **settings: Any) -> Callable[[F], F]:
        made = type("Command", (Command,), {"beside": beside})
        return super().command(name, cls=made, **settings)


class Command(TyperCommand):
    """A command whose words are put into canonical form before typer sees them."""

    beside: Mapping[str, str] = {}  # options of other commands -> why they mean nothing to this one

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.is_boolean: dict[str, bool] = {}  # every option of the command, by its canonical name
        for option in self.params:
            if isinstance(option, TyperOption):
                name = canonical_name(option.opts[0])
                self.is_boolean[name] = option.is_flag
                option.opts = [f"--{name}", *(short for short in option.opts if not short.startswith("--"))]
                if option.is_flag:  # its word always has a value by then, so to typer it is like any other option
                    option.metavar = option.metavar or ("" if option.default is False else "0|1")
                    option.is_flag = option.is_bool_flag = False
                    option.secondary_opts = []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ["--help"] if HELP & set(args) else canonical_words(args, self.is_boolean, say_note, self.beside)
        return super().parse_args(ctx, words)

    def get_help(self, ctx: Any) -> str:
        from .help import of_command  # here, as few commands show it

        return of_command(self, ctx.command_path)

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence in the list of a group's commands, whole: the list wraps it."""
        return super().get_short_help_str(len(self.help or ""))


class CommandGroup(TyperGroup):
    """A group that says which commands it has, and names the one that it does not know."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] == "-h":
            args = ["--help"]
        if not args:
            raise UserError(f"{ctx.command_path}: a command is missing; give one of {', '.join(self.commands)}")
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        from .help import of_group

        return of_group(self, ctx.command_path)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(f"{ctx.command_path} {args[0]}: unknown command; {did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


JSON_SWITCH = {"json": "end with one line of JSON on stdout, all else on stderr"}
Json = Annotated[bool, typer.Option("--json", help="one JSON object")]


def answer(text: str, as_json: bool, **values: Any) -> None:
    """On stdout: the text for people, or the values for programs."""
    say(json.dumps(values, default=str) if as_json else text)


def say_note(note: str) -> None:
    """On stderr, as stdout is the command's answer."""
    typer.echo(f"note: {note}", err=True)


def run_app(app: App, words: Sequence[str], prog_name: str) -> int:
    """Run an app's command and return its exit code. A mistake in the words is a UserError."""
    try:
        result = _built(app).main(list(words), prog_name, standalone_mode=False)
    except typer.TyperException as error:
        told = " ".join(error.format_message().split()).rstrip(".")
        raise UserError(f"{told}; {prog_name} --help says more") from None
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


@cache  # of hundreds of options it takes 0.1 s, and scripts and tests run many commands in one process
def _built(app: App) -> Any:
    return get_command(app)


def within(limits: Any) -> Callable[[Any], Any]:
    """The `parser` of an option of typer's own: a number of one of the types of `base.limits`."""
    numbers: TypeAdapter[Any] = TypeAdapter(limits)

    def parse(value: Any) -> Any:
        try:
            return numbers.validate_python(value)
        except ValidationError as error:
            raise typer.BadParameter(in_words(error.errors()[0])) from None

    parse.__name__ = "number"  # its name in the help
    return parse
