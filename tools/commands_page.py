"""Writes docs/*/commands.md: every command and option, from the commands themselves.

    python tools/commands_page.py           write both pages
    python tools/commands_page.py --check   exit code 1 where they are not current

Options have their texts in options/texts.json. Commands, whose texts are docstrings, have their Chinese ones in
commands_zh.json, with the words of the page.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from pages import write_or_check

from paddlenlp_galvatron.cli.command import EXIT_CODES, Command
from paddlenlp_galvatron.cli.help import default_of
from paddlenlp_galvatron.cli.main import COMMANDS
from paddlenlp_galvatron.options.aliases import VALUES as ALIAS_VALUES
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import PLACES

DOCS = Path(__file__).parents[1] / "docs"
CHINESE = json.loads(Path(__file__).with_name("commands_zh.json").read_text(encoding="utf-8"))  # by the English
MANY = 4  # rows of another command's table, from which on they are not repeated
# The page that says more of a command, where it is not of the command's name.
PAGES = {
    "plan": "plan_file",
    "parity": "train",
    "report": "explain",
    "doctor": "installation",
    "what-if": "fit",
    "gpu-check": "installation",
    "calibrate": "profile",
    "validate": "profile",
}


CONVENTIONS = (
    "`galvatron COMMAND --help` shows the same. Dashes and underscores in names are equivalent. A boolean option "
    "stands alone, which means true, or takes 0, 1, true or false. `None` leaves an option unset. "
    f"{EXIT_CODES}"
)
Translate = Callable[[str], str]  # an English text, in the language of a page


def main() -> int:
    # A KeyError names the English text that commands_zh.json lacks.
    languages: dict[str, Translate] = {"en": str, "zh": CHINESE.__getitem__}
    made = {DOCS / language / "commands.md": page(language, translate) for language, translate in languages.items()}
    return write_or_check(made, "the commands")


def page(language: str, translate: Translate) -> str:
    """The whole page."""
    begin = translate("Made from the commands themselves: `make pages` rewrites this page.")
    parts = [f"# {translate('Commands and options')}\n\n{begin}\n{translate(CONVENTIONS)}\n"]
    listed: dict[str, str] = {}
    for name in COMMANDS:
        app = import_module(f"paddlenlp_galvatron.cli.{name.replace('-', '_')}").app
        parts.append(f"## {name}\n")
        target = DOCS / language / f"{PAGES.get(name, name)}.md"
        if target.exists():
            heading = target.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            parts[-1] = f"## {name}\n\n{translate('More')}: [{heading}]({target.name})\n"
        for sub, command in app.commands.items():
            parts += section(f"{name} {sub}".strip(), command, language, translate, bool(sub), listed)
    return "\n".join(parts)


def section(
    name: str, command: Command, language: str, translate: Translate, has_heading: bool, listed: dict[str, str]
) -> Iterator[str]:
    """One command. `listed`: rows that stand in tables above -> their command; many of one are only named."""
    if has_heading:
        yield f"### {name}\n"
    usage = " ".join(["galvatron", name, *command.positional.values(), "[OPTIONS]"])
    yield f"`{usage}`: {translate(command.help)}\n"
    rows = [row(command, option, language, translate) for option in (*command.positional, *command.options)]
    counts = Counter(listed.get(each, "") for each in rows)
    above: dict[str, list[str]] = {other: [] for other, count in counts.items() if other and count >= MANY}
    here = []
    for each in rows:
        if (known := above.get(listed.get(each, ""))) is not None:
            known.append(each)
        else:
            here.append(each)
            listed[each] = name
    if here:
        yield f"| {' | '.join(map(translate, ('option', 'other names', 'default', 'meaning')))} |\n|---|---|---|---|"
        yield "\n".join(here) + "\n"
    for other, known in above.items():
        names = " ".join(each.split(" | ")[0].removeprefix("| ") for each in known)
        anchor = other.replace(" ", "-")
        yield f"{translate('And, as in {}:').format(f'[{other}](#{anchor})')} {names}\n"


def row(command: Command, name: str, language: str, translate: Translate) -> str:
    """One option, or argument."""
    info, argument = command.fields[name], command.positional.get(name)
    others = ["`-o`"] * (name in PLACES) + [f"`--{name}`"] * bool(argument)
    for other in other_names(name, command.fields):
        others.append(f"`--{other}`" + translate(" (the opposite)") * (ALIAS_VALUES.get(other, {}).get("0") == "1"))
    text = command.text(name, language).replace("<", "&lt;").replace("|", "\\|")
    shown = f"`{argument or f'--{name}'}`"
    default = translate("must be given") if info.is_required() else default_of(info)
    return f"| {shown} | {' '.join(others)} | {default} | {text} |"


if __name__ == "__main__":
    sys.exit(main())
