"""The tutorials are run as they stand, block by block in an empty folder; what needs GPUs is checked by its words."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli.main import commands as all_commands
from paddlenlp_galvatron.options.group import read_words

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = [
    *sorted(path.name for path in (DOCS / "en").glob("tutorial_*.md")),
    "finetune.md",
    "fit.md",
    "installation.md",
]
BLOCK = re.compile(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, mark and text of each."""
    return BLOCK.findall(page.read_text())


def commands(text: str) -> list[list[str]]:
    """The words of each command behind `galvatron`; a shell would have nothing else to do."""
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    assert all(words[0] in ("galvatron", "export") for words in lines), text
    return [words[1:] for words in lines if words[0] == "galvatron"]


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs(name, galvatron, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ""
    for language, mark, text in blocks(DOCS / "en" / name):
        if language == "python":
            exec(compile(text, name, "exec"), {})
        elif language == "text":
            # Numbers follow the prices; the words around them are what the reader looks for.
            for line in text.splitlines():
                words = re.findall(r"[A-Za-z][\w' ,:()-]*[a-z]", line)
                assert all(word in said for word in words[:1]), line
        elif mark == "on-gpus":
            check_words(text)
        elif mark != "paddle" or find_spec("paddle"):
            for words in commands(text):
                ran = galvatron(*words)
                assert ran.code == 0, (words, ran.err)
                said += ran.out


def check_words(text: str) -> None:
    """Commands and options exist. Raises UserError where not."""
    for words in commands(text):
        known = all_commands()
        length = 1 if words[0] in known else 2
        command = known[" ".join(words[:length])]
        read_words(words[length:], command.is_boolean, beside=command.beside)


def test_both_languages_show_the_same_blocks():
    for name in TUTORIALS:
        assert blocks(DOCS / "en" / name) == blocks(DOCS / "zh" / name), name
