"""Runs the command blocks of pages, and writes their output into the text blocks behind them.

    python tools/blocks.py [PAGE ...]            write it, into the Chinese pages too
    python tools/blocks.py --check [PAGE ...]    exit code 1, and the first line of each block that is stale

The blocks of a page run one after the other in a folder that has `examples`: `sh` has galvatron's commands, `python` a
program, `json FILE` a file. A `text` block shows lines of the output of the block of commands before it; `…` stands
for lines that are left out. Words count exactly, numbers within 2 %. Marks behind the language:
`checked` is not run, its commands and options are checked; `paddle` needs Paddle; `exit-3` is the exit code; of `text`,
`timed` has numbers of this machine, which are not compared.
"""

import io
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.cli.main import commands, main
from paddlenlp_galvatron.options.group import read_words

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(sh|python|json|text)(?: ([\w./-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
COMMENT = re.compile(r" +# .*")
CLOSE, LEFT_OUT = 0.02, "…"


class Block(NamedTuple):
    language: str
    mark: str
    text: str
    line: int  # of its first line, on the page


def pages() -> list[Path]:
    """Those that have commands to run."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs" / "en").glob("*.md"))]
    return [page for page in every if any(block.language == "sh" for block in blocks(page.read_text()))]


def translation(page: Path) -> Path:
    return ROOT / "README_zh.md" if page.parent == ROOT else ROOT / "docs" / "zh" / page.name


def blocks(page: str) -> list[Block]:
    return [
        Block(found[1], found[2] or "", found[3], page.count("\n", 0, found.start(3)) + 1)
        for found in BLOCK.finditer(page)
    ]


def untranslated(page: Path) -> list[tuple[str, str, str]]:
    """A page's blocks without comments."""
    return [(block.language, block.mark, COMMENT.sub("", block.text)) for block in blocks(page.read_text())]


def is_run(block: Block) -> bool:
    return block.mark != "checked" and (block.mark != "paddle" or find_spec("paddle") is not None)


def galvatron_words(block: Block) -> Iterator[list[str]]:
    """The words of each command behind `galvatron`. Raises ValueError for other commands, which are not run."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "galvatron" in words[:1] or block.mark == "checked":
            if "galvatron" in words:
                yield words[words.index("galvatron") + 1 :]
        elif words[:1] not in ([], ["export"]):
            raise ValueError(f"{line}: only galvatron is run here; mark the block checked, or indent it")


def check_words(words: list[str]) -> None:
    """Raise UserError where the command or an option does not exist."""
    known = commands()
    length = 1 if words[0] in known else 2
    command = known[" ".join(words[:length])]
    read_words(words[length:], command.is_boolean, shared=command.shared)


def run(block: Block) -> list[str]:
    """The lines that the commands of a block print. Raises ValueError for another exit code than the mark has."""
    printed, expected = io.StringIO(), int(block.mark.removeprefix("exit-")) if block.mark.startswith("exit-") else 0
    for words in galvatron_words(block):
        if not is_run(block):
            check_words(words)
        else:
            with redirect_stdout(printed), redirect_stderr(printed):
                code = main(words)
            if code != expected:
                raise ValueError(f"galvatron {' '.join(words)}: exit code {code}\n{printed.getvalue()}")
    return printed.getvalue().splitlines()


def alike(line: str, printed: str, timed: bool = False) -> bool:
    """Whether words are equal, and numbers close."""
    if NUMBER.sub("0", line).split() != NUMBER.sub("0", printed).split():
        return False
    values = ([float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (line, printed))
    return timed or all(abs(ours - theirs) <= CLOSE * abs(theirs) for ours, theirs in zip(*values, strict=True))


def find(line: str, printed: Sequence[str], place: int, last: int) -> int | None:
    """The first printed line that is equal but for the last digits, or else has the same words."""
    for timed in (False, True):
        for number in range(place, last):
            if alike(line, printed[number], timed):
                return number
    return None


def places(shown: Sequence[str], printed: Sequence[str], gaps: bool = False) -> list[int | None]:
    """Where each line is printed, in order; None: nowhere. Lines are left out at `…` alone, or with `gaps` anywhere."""
    found: list[int | None] = []
    behind = 0
    for before, line in pairwise([LEFT_OUT, *shown]):
        last = len(printed) if gaps or before == LEFT_OUT else min(behind + 1, len(printed))
        place = None if line == LEFT_OUT else find(line, printed, behind, last)
        found.append(place)
        behind = behind if place is None else place + 1
    return found


def rewritten(shown: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    """The shown lines as they are printed now, with a sign for each gap; those that are not printed as they were."""
    behind: int | None = None  # the last line
    for line, place in zip(shown, places(shown, printed, gaps=True), strict=True):
        if line == LEFT_OUT:
            continue
        if place is None:
            yield line
            continue
        if behind is not None and place > behind:
            yield LEFT_OUT
        yield printed[place].rstrip()
        behind = place + 1


def stale_lines(block: Block, printed: Sequence[str]) -> Iterator[int]:
    shown = block.text.splitlines()
    for number, (line, place) in enumerate(zip(shown, places(shown, printed), strict=True)):
        if line != LEFT_OUT and (place is None or not alike(line, printed[place], block.mark == "timed")):
            yield block.line + number


def renew(page: Path, check: bool) -> list[str]:
    """Run a page's blocks, and write their output. With `check` write nothing: name the stale blocks."""
    text, faults = page.read_text(), []
    fresh, printed, skipped = text, [""], False
    with TemporaryDirectory() as folder, chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        for block in blocks(text):
            if block.language == "sh":
                printed = run(block)
                skipped = not is_run(block)
            elif block.language == "python" and is_run(block):
                exec(compile(block.text, str(page), "exec"), {})
            elif block.language == "json" and block.mark:
                write_text(Path(block.mark), block.text)
            elif block.language == "text" and not skipped:
                stale = list(stale_lines(block, printed))
                if stale and not check:
                    now = "".join(f"{line}\n" for line in rewritten(block.text.splitlines(), printed))
                    fresh = fresh.replace(block.text, now, 1)
                    stale = list(stale_lines(block._replace(text=now), printed))
                faults += [f"{page}:{line}: differs from the output; renew it: make pages" for line in stale[:1]]
    other = translation(page)
    if fresh != text:
        page.write_text(fresh)
        theirs = other.read_text()
        for old, new in zip(blocks(text), blocks(fresh), strict=True):
            theirs = theirs.replace(old.text, new.text, 1) if old.text != new.text else theirs
        other.write_text(theirs)
    if untranslated(page) != untranslated(other):
        faults.append(f"{other}: its blocks are not those of {page.name}")
    return faults


if __name__ == "__main__":
    given = [Path(word).resolve() for word in sys.argv[1:] if word != "--check"]
    sys.exit("\n".join(fault for page in given or pages() for fault in renew(page, "--check" in sys.argv[1:])) or 0)
