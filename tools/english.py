"""Checks the English of docstrings, comments, messages and pages; `make lint` runs it.

    python tools/english.py [FILE ...]        no FILE: the whole project

A sentence begins with its subject, so with none of OPENERS; questions may. HOUSE_WORDS have a standard word.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (
    *("paddlenlp_galvatron/**/*.py", "search_engine/*.?pp"),
    *("benchmarks/*.py", "tools/*.py", "docs/en/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
OPENERS = re.compile(r"(?:^|(?<=[.!?:;]\s))(?:Of|What|Who|That)\b[^.!?]*(?P<end>[.!?]|$)")
HOUSE_WORDS = {  # the glossary has the standard words
    "bid": "column",
    "crew": "local ranks",
    "foretell": "predict",
    "lap": "sample",
    "menu": "feasible sizes",
    "sum of gradients": "gradient all-reduce or reduce-scatter",
    "gathers of zero3": "ZeRO-3 all-gather",
    "collectives of split layers": "TP/CP/Ulysses communication",
    "waiting for other stages": "pipeline bubble",
    "change of layout": "resharding",
    "changes of layout": "resharding",
    "tokens of a sample": "sequence length",
    "samples of a step": "global batch size",
    "devices of a node": "GPUs per node",
    "devices on each node": "GPUs per node",
    "what binds": "bottleneck",
    "who runs what": "layer placement",
    "goes on at": "resuming from",
    "its visits": "repeatability",
}
HOUSE_WORD = re.compile(rf"(?i:\b({'|'.join(HOUSE_WORDS)})s?\b)")
NO_PROSE = re.compile(r"^```.*?^```|^    \S.*?$|^#.*?$", re.MULTILINE | re.DOTALL)

SUSPECT = re.compile(rf"\b(Of|What|Who|That)\b|# (what|who|that)\b|{HOUSE_WORD.pattern}")

Texts = Iterator[tuple[int, str]]  # paragraphs, each with the number of its first line


def python_texts(source: str) -> Texts:
    """Docstrings and other strings by paragraph, and comments; those of successive lines as one."""
    comment: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            yield from markdown_texts(cleandoc(re.sub(r"^\w*[\"']+|[\"']+$", "", token.string)), token.start[0])
        elif token.type == tokenize.COMMENT:
            if comment and (token.start[0] - comment[-1].start[0] > 1 or token.line.strip() != token.string):
                yield joined(comment)
                comment = []
            comment.append(token)
    if comment:
        yield joined(comment)


def joined(comment: list[tokenize.TokenInfo]) -> tuple[int, str]:
    text = " ".join(token.string.lstrip("#! ") for token in comment)
    return comment[0].start[0], re.sub("^(what|who|that) ", lambda word: word[0].capitalize(), text)


def cpp_texts(source: str) -> Texts:
    lines = [line.partition("//")[2].strip(" /") for line in source.splitlines()]
    yield from markdown_texts("\n".join(lines))


def markdown_texts(source: str, first: int = 1) -> Texts:
    """Paragraphs, list items and cells, without code and headings."""
    source = NO_PROSE.sub(lambda code: "\n" * code[0].count("\n"), source)
    for part in re.finditer(r"(?:(?!\n\s*(?:\n|[-*#>] |\d+\. ))[^|])+", source):
        words = re.sub("`[^`]*`", "`", part[0]).split()
        yield first + source.count("\n", 0, part.start()), " ".join(words).lstrip("-*> 1234567890.")


def faults(path: Path) -> Iterator[str]:
    source = path.read_text()
    texts = {".py": python_texts, ".md": markdown_texts}.get(path.suffix, cpp_texts)
    for line, text in texts(source) if SUSPECT.search(source) else ():  # tokenizing all files takes seconds
        for found in OPENERS.finditer(text):
            if found["end"] != "?":
                yield f"{path}:{line}: begin with the subject: {found[0][:60]}"
        for found in HOUSE_WORD.finditer(text):
            yield f"{path}:{line}: {found[0]}: say {HOUSE_WORDS[found[1].lower()]}"


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]] or [path for place in PLACES for path in sorted(ROOT.glob(place))]
    found = [fault for path in paths if path.name != Path(__file__).name for fault in faults(path)]
    sys.exit("\n".join(found) or 0)
