"""Writes docs/*/commands.md: every command and option, from the commands themselves.

    python tools/commands_page.py           write both pages
    python tools/commands_page.py --check   exit code 1 where they are not current

The Chinese page says what commands_zh.json has for each English text, and nothing else: an option of the same name may
mean another thing in another command.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pages import write_or_check
from typer.main import get_command

from paddlenlp_galvatron.cli.main import COMMANDS
from paddlenlp_galvatron.interop.aliases import WORDS as ALIAS_VALUES
from paddlenlp_galvatron.interop.aliases import other_names

DOCS = Path(__file__).parents[1] / "docs"
CHINESE = json.loads(Path(__file__).with_name("commands_zh.json").read_text(encoding="utf-8"))  # by the English
DEFAULT = re.compile(r"(?:; must be given)? ?(?:\[default: (.*)\])?$")
MANY = 4  # rows of another command's table, from which on they are not repeated
# The page that says more of a command, where it is not of the command's name.
PAGES = {
    "plan": "plan_file",
    "quickstart": "quickstart",
    "parity": "train",
    "report": "explain",
    "doctor": "installation",
    "what-if": "what_if",
    "gpu-check": "gpus",
    "calibrate": "accuracy",
}


class Words(NamedTuple):
    """Texts of a language."""

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
        "Commands and options",
        "Made from the commands themselves: `make pages` writes this page anew.",
        "`galvatron COMMAND --help` shows the same. Dashes and underscores in names are equivalent. A boolean option "
        "stands alone, which means true, or takes 0, 1, true or false. `None` leaves an option unset. "
        "Exit codes: 0 done, 1 failed, 2 bad input, 3 nothing feasible, 130 Ctrl-C.",
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
        "命令与选项",
        "本页由命令本身生成：`make pages` 会重新写出。",
        "`galvatron COMMAND --help` 显示同样的内容。短横线与下划线等价；布尔选项可以不带值（即 true），"
        "或取 0、1、true、false；`None` 表示不设置。退出码：0 完成，1 失败，2 输入有误，3 无可行方案，130 Ctrl-C。",
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
    return write_or_check({DOCS / language / "commands.md": page(language) for language in WORDS}, "the commands say")


def page(language: str) -> str:
    """The whole page."""
    words = WORDS[language]
    parts = [f"# {words.title}\n\n{words.begin}\n{words.conventions}\n"]
    told: dict[str, str] = {}
    for name in COMMANDS:
        app = import_module(f"paddlenlp_galvatron.cli.{name.replace('-', '_')}").app
        command = get_command(app)
        subcommands = getattr(command, "commands", None)
        parts.append(f"## {name}\n")
        target = DOCS / language / f"{PAGES.get(name, name)}.md"
        if target.exists():
            heading = target.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            parts[-1] = f"## {name}\n\n{words.more}: [{heading}]({target.name})\n"
        for sub, one in (subcommands or {"": command}).items():
            parts += section(f"{name} {sub}".strip(), one, words, bool(subcommands), told)
    return "\n".join(parts)


def section(name: str, command: Any, words: Words, has_heading: bool, told: dict[str, str]) -> Iterator[str]:
    """One command. `told`: rows that stand in tables above -> their command; many of one are only named."""
    if has_heading:
        yield f"### {name}\n"
    arguments = [one for one in command.params if not is_option(one)]
    usage = " ".join(["galvatron", name, *(str(one.metavar or one.name.upper()) for one in arguments), "[OPTIONS]"])
    yield f"`{usage}`: {in_words(' '.join((command.help or '').split()), words)}\n"
    rows = [row(one, words, command.is_boolean) for one in command.params if one.name != "help"]
    counts = Counter(told.get(each, "") for each in rows)
    above = {other: [] for other, count in counts.items() if other and count >= MANY}  # type: dict[str, list[str]]
    here = []
    for each in rows:
        other = told.setdefault(each, name)
        above.get(other, here).append(each)
    if here:
        yield f"| {words.option} | {words.others} | {words.default} | {words.meaning} |\n|---|---|---|---|"
        yield "\n".join(here) + "\n"
    for other, known in above.items():
        names = " ".join(each.split(" | ")[0].removeprefix("| ") for each in known)
        anchor = other.replace(" ", "-")
        yield f"{words.as_in.format(f'[{other}](#{anchor})')} {names}\n"


def is_option(one: Any) -> bool:
    return bool(one.param_type_name == "option")


def row(one: Any, words: Words, known: Container[str]) -> str:
    """One option, or argument."""
    name = max(one.opts, key=len).removeprefix("--")
    shown = f"`--{name}`" if is_option(one) else f"`{one.metavar or one.name.upper()}`"
    short = [opt for opt in one.opts if not opt.startswith("--")] if is_option(one) else []
    others = [f"`{opt}`" for opt in short]
    if is_option(one):
        for other in other_names(name, known):
            others.append(f"`--{other}`" + words.opposite * (ALIAS_VALUES.get(other, {}).get("0") == "1"))
    text = " ".join((one.help or "").split())
    found = DEFAULT.search(text)
    default = found[1] if found and found[1] else plain_default(one)
    needed = one.required or "; must be given" in text
    text = in_words(DEFAULT.sub("", text), words).replace("<", "&lt;").replace("|", "\\|")
    cells = [shown, " ".join(others), words.needed if needed else default, text]
    return "| " + " | ".join(cells) + " |"


def in_words(text: str, words: Words) -> str:
    """Raises KeyError for an English text that commands_zh.json lacks."""
    return str(CHINESE[text]) if words is WORDS["zh"] and text else text


def plain_default(one: Any) -> str:
    default = one.default
    if default is None or callable(default) or default == () or one.required or not is_option(one):
        return ""
    return str(int(default) if isinstance(default, bool) else getattr(default, "value", default))


if __name__ == "__main__":
    sys.exit(main())
