"""Writes docs/*/commands.md: every command and option, from the commands themselves.

    python tools/commands_page.py           write both pages
    python tools/commands_page.py --check   exit code 1 where they are not current

Options have their texts in options/texts.json; commands, which are docstrings, their Chinese ones in commands_zh.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pages import write_or_check

from paddlenlp_galvatron.cli.command import EXIT_CODES, Command
from paddlenlp_galvatron.cli.help import default_of
from paddlenlp_galvatron.cli.main import COMMANDS
from paddlenlp_galvatron.options.aliases import VALUES as ALIAS_VALUES
from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.group import PLACES

DOCS = Path(__file__).parents[1] / "docs"
CHINESE = json.loads(
    Path(__file__).with_name("commands_zh.json").read_text(encoding="utf-8")
)  # of commands, by the English
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


class Words(NamedTuple):
    """Texts of a language."""

    language: str
    title: str
    begin: str
    conventions: str
    argument: str
    option: str
    others: str
    default: str
    meaning: str
    needed: str
    more: str
    opposite: str
    as_in: str


WORDS = {
    "en": Words(
        "en",
        "Commands and options",
        "Made from the commands themselves: `make pages` rewrites this page.",
        "`galvatron COMMAND --help` shows the same. Dashes and underscores in names are equivalent. A boolean option "
        "stands alone, which means true, or takes 0, 1, true or false. `None` leaves an option unset. "
        f"{EXIT_CODES}",
        "argument",
        "option",
        "other names",
        "default",
        "meaning",
        "must be given",
        "More",
        " (the opposite)",
        "And, as in {}:",
    ),
    "zh": Words(
        "zh",
        "命令与选项",
        "本页由命令本身生成：`make pages` 会重新写出。",
        "`galvatron COMMAND --help` 显示同样的内容。短横线与下划线等价；布尔选项可以不带值（即 true），"
        "或取 0、1、true、false；`None` 表示不设置。退出码：0 完成，1 失败，2 输入有误，3 无可行方案，"
        "4 有检查因时间不够而未做（gpu-check），130 Ctrl-C。",
        "参数",
        "选项",
        "其他名字",
        "默认值",
        "含义",
        "必填",
        "详见",
        "（含义相反）",
        "此外，同 {}：",
    ),
}


def main() -> int:
    return write_or_check({DOCS / language / "commands.md": page(language) for language in WORDS}, "the commands")


def page(language: str) -> str:
    """The whole page."""
    words = WORDS[language]
    parts = [f"# {words.title}\n\n{words.begin}\n{words.conventions}\n"]
    listed: dict[str, str] = {}
    for name in COMMANDS:
        app = import_module(f"paddlenlp_galvatron.cli.{name.replace('-', '_')}").app
        parts.append(f"## {name}\n")
        target = DOCS / language / f"{PAGES.get(name, name)}.md"
        if target.exists():
            heading = target.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            parts[-1] = f"## {name}\n\n{words.more}: [{heading}]({target.name})\n"
        for sub, command in app.commands.items():
            parts += section(f"{name} {sub}".strip(), command, words, bool(sub), listed)
    return "\n".join(parts)


def section(name: str, command: Command, words: Words, has_heading: bool, listed: dict[str, str]) -> Iterator[str]:
    """One command. `listed`: rows that stand in tables above -> their command; many of one are only named."""
    if has_heading:
        yield f"### {name}\n"
    usage = " ".join(["galvatron", name, *command.positional.values(), "[OPTIONS]"])
    yield f"`{usage}`: {in_words(command.help, words)}\n"
    rows = [row(command, option, words) for option in (*command.positional, *command.options)]
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
        yield f"| {words.option} | {words.others} | {words.default} | {words.meaning} |\n|---|---|---|---|"
        yield "\n".join(here) + "\n"
    for other, known in above.items():
        names = " ".join(each.split(" | ")[0].removeprefix("| ") for each in known)
        anchor = other.replace(" ", "-")
        yield f"{words.as_in.format(f'[{other}](#{anchor})')} {names}\n"


def row(command: Command, name: str, words: Words) -> str:
    """One option, or argument."""
    info, argument = command.fields[name], command.positional.get(name)
    others = ["`-o`"] * (name in PLACES) + [f"`--{name}`"] * bool(argument)
    for other in other_names(name, command.fields):
        others.append(f"`--{other}`" + words.opposite * (ALIAS_VALUES.get(other, {}).get("0") == "1"))
    text = command.text(name, words.language).replace("<", "&lt;").replace("|", "\\|")
    shown = f"`{argument or f'--{name}'}`"
    return f"| {shown} | {' '.join(others)} | {words.needed if info.is_required() else default_of(info)} | {text} |"


def in_words(text: str, words: Words) -> str:
    """Raises KeyError for an English text that commands_zh.json lacks."""
    return str(CHINESE[text]) if words.language == "zh" else text


if __name__ == "__main__":
    sys.exit(main())
