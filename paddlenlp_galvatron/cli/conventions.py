"""Conventions for the options of every command.

Dashes and underscores are the same. An option answers to its aliases. A boolean takes nothing, 0/1 or true/false.
`None` leaves an option unset. A mistake is one line and exit code 2. A command has all this by being made with `App`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.text import shortened
from paddlenlp_galvatron.options.aliases import BEATEN, canonical_name, canonical_value, did_you_mean, plain_name
from paddlenlp_galvatron.options.foreign import SEVERAL, SWITCHES, Fate, fate_of, idle_note

BOOLEAN_WORDS = ("0", "1", "false", "true")
UNSET = "None"
HELP = {"--help", "-h"}
INTERRUPTED = 130  # what typer makes of a Ctrl-C, without a word

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
            message = error.errors()[0]["msg"]
            raise typer.BadParameter(f"{message[0].lower()}{message[1:]} (it is {shortened(repr(value))})") from None

    parse.__name__ = "number"  # what the help calls it
    return parse


def canonical_words(
    words: Sequence[str],
    is_boolean: Mapping[str, bool],
    say: Callable[[str], None] = lambda note: None,
    beside: Mapping[str, str] = {},
) -> list[str]:
    """The words of a command line as `--name=value` and positional ones; options set to `None` are left out.

    `is_boolean` holds every known option by its canonical name, `beside` those of another command that scripts give to
    all, with the reason why they mean nothing to this one. `say` is told which have no effect. Raises UserError with a
    line a fault.
    """
    result: list[str] = []
    faults: list[str] = []
    idle: dict[str, str] = {}
    rest = deque(words)
    held = {plain_name(word.partition("=")[0]) for word in rest if word.startswith("--")}
    while rest:
        word = rest.popleft()
        if word == "--":
            result += [word, *rest]
            break
        if not word.startswith("--"):
            result.append(word)
            continue
        given, equals, behind = word.partition("=")
        name = canonical_name(given, is_boolean)
        taken = behind if equals else _take(rest, given, name, is_boolean.get(name))
        if taken is None and name != plain_name(given) and name in held:
            continue  # `--device h100 --analytic`: the second says nothing more
        if taken is None:
            faults.append(f"{given}: a value is missing; give {given} VALUE")
            continue
        value = canonical_value(given, taken)
        if name not in is_boolean:
            fate = Fate(idle=beside[name]) if name in beside else fate_of(name, value)
            if fate is None:
                faults.append(f"{given}: unknown option; {did_you_mean(given, is_boolean, prefix='--')}")
            elif fate.fault:
                faults.append(f"{given}: {fate.fault}")
            elif fate.idle:
                idle[given] = fate.idle
        elif BEATEN.get(plain_name(given)) in held:
            idle[given] = f"--{name} holds"
        elif is_boolean[name] and value.lower() not in BOOLEAN_WORDS and value != UNSET:
            faults.append(f"{given}: {value!r} is no boolean; give 0, 1, true or false, or nothing for true")
        elif value != UNSET:
            result.append(f"--{name}={value}")
    if faults:
        raise UserError(faults)
    if idle:
        say(idle_note(idle))
    return result


def _take(rest: deque[str], given: str, name: str, boolean: bool | None) -> str | None:
    """Take an option's value off the words behind it. `boolean`: None for an unknown option."""
    if name in SEVERAL:
        several = []
        while rest and not rest[0].startswith("--"):
            several.append(rest.popleft())
        return " ".join(several)
    following = canonical_value(given, rest[0]) if rest else "--"
    if (boolean or (boolean is None and name in SWITCHES)) and not _is_boolean_word(following):
        return "true"
    if following.startswith("--"):
        return None if boolean is False else ""
    return rest.popleft()


def _is_boolean_word(word: str) -> bool:
    return word.lower() in BOOLEAN_WORDS or word == UNSET
