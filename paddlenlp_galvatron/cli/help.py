"""The text of `--help`: usage, an example, and the options in panels, common options first."""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.reading import read_json
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import PLACES, is_boolean

from .command import EXIT_CODES, App, Command

WIDEST = 120  # columns, also without a terminal
KINDS = {int: "<int>", float: "<float>", Path: "<path>"}  # value names by type; other types are shown as text
EXAMPLES: dict[str, str] = read_json(Path(__file__).with_name("examples.json"))  # keyed by command
FIRST, LAST, OTHERS = ("Common", "Space", "Profiles"), "Output", "Options"
# Option name -> panel; takes precedence over the panel of its group.
PANELS = {name: panel for panel, names in read_json(Path(__file__).with_name("panels.json")).items() for name in names}


def of_command(command: Command, path: str) -> str:
    """The help of a command; `path`: its full name, such as `galvatron plan show`."""
    rows: dict[str, list[tuple[Text, Text]]] = {}
    usage = path
    for name, shown in command.positional.items():
        usage += f" {shown}" if command.fields[name].is_required() else f" [{shown}]"
        rows.setdefault("Arguments", []).append((Text(shown), _meaning(command, name)))
    places = {name: rank for rank, name in enumerate(PANELS)}
    for name, info in sorted(command.options.items(), key=lambda item: places.get(item[0], len(places))):
        short = ", -o" if name in PLACES else ""
        typed = Text.assemble((f"--{name}{short}", "bold"), f" {_kind(info)}")
        panel = PANELS.get(name) or command.panels.get(name, OTHERS)
        rows.setdefault(panel, []).append((typed, _meaning(command, name)))
    rows.setdefault(OTHERS, []).append((Text("--help", "bold"), Text("Show this message and exit.")))
    order = ["Arguments", *FIRST, *(panel for panel in rows if panel not in (*FIRST, LAST, "Arguments")), LAST]
    lines: list[Any] = [f"Usage: {usage} [OPTIONS]\n", f"{command.help}\n"]
    if example := EXAMPLES.get(path.removeprefix("galvatron ")):
        lines.append(Text.assemble("Example: ", (example, "bold"), "\n"))
    return _printed([*lines, *(_panel(panel, rows[panel]) for panel in order if panel in rows), EXIT_CODES])


def of_group(group: App, path: str) -> str:
    """The help of a group: its commands, each with its first sentence."""
    rows = [(Text(name, "bold"), Text(re.split(r"\.(?: |$)", each.help)[0])) for name, each in group.commands.items()]
    return _printed([f"Usage: {path} COMMAND [OPTIONS]\n", f"{group.help}\n", _panel("Commands", rows), EXIT_CODES])


def default_of(info: FieldInfo) -> str:
    """A field's default as a user types it; empty where there is none or it depends on the machine."""
    default = info.default
    if info.is_required() or info.default_factory or default is None or default == ():
        return ""
    if isinstance(default, bool):
        return str(int(default))
    if isinstance(default, float):
        return f"{default:g}"
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _meaning(command: Command, name: str) -> Text:
    """An option's meaning, with its default and its other names."""
    info = command.fields[name]
    text = command.text(name) + "; must be given" * info.is_required()
    default = "" if name in command.switches else default_of(info)
    text += f" [default: {default}]" if default else ""
    others = [f"--{other}" for other in [*[name] * (name in command.positional), *other_names(name, command.fields)]]
    return Text.assemble(text, (f" (also {', '.join(others)})" if others else "", "dim"))


def _kind(info: FieldInfo) -> str:
    """A value's name in the help; a switch with default off takes no value."""
    if is_boolean(info):
        return "" if info.default is False else "0|1"
    return next((name for kind, name in KINDS.items() if kind in _types(info.annotation)), "<str>")


def _types(annotation: Any) -> Iterator[Any]:
    """Types that a value may have; lists and choices have none and are shown as text."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _types(inner)
    else:
        yield annotation


def _panel(title: str, rows: Iterable[tuple[Text, Text]]) -> Panel:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(max_width=34, min_width=16, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Panel(table, title=title, title_align="left")


def _printed(items: Iterable[Any]) -> str:
    console = Console(width=min(shutil.get_terminal_size((WIDEST, 0)).columns, WIDEST))
    with console.capture() as capture:
        for item in items:
            console.print(item)
    return capture.get().rstrip("\n")
