"""Commands whose options are the fields of groups of options, so that each option is described in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from paddlenlp_galvatron.options.canonical import canonical_options, read_options
from paddlenlp_galvatron.options.group import Options, is_boolean
from paddlenlp_galvatron.plan import UserError

from .conventions import App, say_note

KINDS = {int: "<int>", float: "<float>", Path: "<path>"}  # names of values in the help; others are text
BARE = " "  # a switch has no value
LIST = "list"  # a switch that needs nothing else
PLACES = ("output", "output_dir", "output_config_path")  # options that -o sets
CONFIG = "file of options, YAML or JSON; options on the command line win over it"


def add_command(
    app: App,
    name: str | None,
    work: Callable[..., None],
    *groups: type[Options],
    switches: Mapping[str, str] = {},
    positional: tuple[str, str] | None = None,
    beside: Mapping[str, str] = {},
) -> None:
    """Add a command that calls `work` with the options that were given, by canonical name; its docstring is the help.

    Options are unset by default: the fields of the groups have the defaults. `switches` (name -> description) are
    booleans of the command line alone; `work` gets them by keyword. `positional`: a field that may be given without its
    name, and what the help calls it. `beside`: options of another command that scripts give to all, and why they mean
    nothing to this one.
    """
    fields = {field: info for group in reversed(groups) for field, info in group.model_fields.items()}

    panels = {field: group.panel for group in reversed(groups) for field in group.model_fields}

    def parameter(option: str, kind: Any, description: str, shown: str | None = None) -> inspect.Parameter:
        names = (f"--{option}", "-o") if option in PLACES else (f"--{option}",)
        given = typer.Option(*names, help=description, metavar=shown, rich_help_panel=panels.get(option))
        annotation = Annotated[kind | None, given]
        return inspect.Parameter(f"given_{option}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    parameters = [parameter("config", str, CONFIG, KINDS[Path])]
    parameters += [parameter(switch, bool, description, BARE) for switch, description in switches.items()]
    if positional:
        argument = typer.Argument(help=_told(fields[positional[0]]), metavar=positional[1])
        annotation = Annotated[str | None, argument]
        parameters.append(
            inspect.Parameter("word", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    for field, info in fields.items():
        told = f"the same as {positional[1]}" if positional and field == positional[0] else _told(info)
        parameters.append(parameter(field, bool if is_boolean(info) else str, told, _kind(info)))

    def command(**given: Any) -> None:
        flags = {option.removeprefix("given_"): value for option, value in given.items() if value is not None}
        config, word = flags.pop("config", None), flags.pop("word", None)
        if positional and word is not None:
            if positional[0] in flags:
                raise UserError(f"{positional[1]}: given twice, also as --{positional[0]}")
            flags[positional[0]] = word
        turned = {switch: flags.pop(switch, False) for switch in switches}
        values = canonical_options(read_options(Path(config)), fields, say_note) if config else {}
        values |= flags
        if positional and fields[positional[0]].is_required() and positional[0] not in values and not turned.get(LIST):
            raise UserError(
                f"{positional[1]}: missing ({fields[positional[0]].description}); name it behind the command"
            )
        work(values, **turned)

    command.__doc__ = work.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, beside=beside)(command)


def _kind(info: FieldInfo) -> str | None:
    """A value's name in the help; None for a boolean that may be switched off, whose values are shown."""
    if is_boolean(info):
        return BARE if info.default is False else None
    return next((name for kind, name in KINDS.items() if kind in _types(info.annotation)), "<str>")


def _types(annotation: Any) -> Iterator[Any]:
    """Those that a value may have; lists and choices have none, they are text."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for one in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _types(one)
    else:
        yield annotation


def _told(info: FieldInfo) -> str:
    """A field's text in the help."""
    if info.is_required():
        return f"{info.description}; must be given"
    default = info.default
    if info.default_factory or default is None or default == ():  # a computed default differs by machine
        return str(info.description)
    if isinstance(default, bool):
        default = int(default)
    elif isinstance(default, float):
        default = f"{default:g}"
    elif isinstance(default, tuple):
        default = ",".join(default)
    return f"{info.description} [default: {default}]"
