"""Checks the English of docstrings, comments, messages, names and pages, and terms of Chinese pages;
`make lint` runs it.

    python tools/english.py [FILE ...]        no FILE: the whole project

A sentence begins with its subject, so with none of OPENERS; questions may. words.json has the words that
are not used, each with the standard one; in Chinese a thing has one term, that of PaddleNLP's documentation.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (
    *("paddlenlp_galvatron/**/*.py", "paddlenlp_galvatron/options/*.json", "search_engine/*.?pp"),
    *("paddlenlp_galvatron/cli/*.json", "paddlenlp_galvatron/training/*/*.json"),
    *("benchmarks/*.py", "tools/*.py", "docs/en/*.md", "docs/dev/*.md"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/zh/*.md", "*_zh.md", "tools/commands_zh.json", "tests/**/*.py"),
)
OPENERS = re.compile(r"(?:^|(?<=[.!?:;]\s))(?:Of|What|Who|That)\b[^.!?]*(?P<end>[.!?]|$)")
PRONOUNS = re.compile("one|own|found|given|some|before")  # say nothing of a variable's content
FRAGMENT = re.compile(
    r"\S  # ((?:it|they|those|these|or|else|of|in|by|as|for|from|with|without|where|whose|which|at|to|on|behind|after|"
    r"until)\b(?: \S+){1,7})$"
)
PRIVATE_NAMES = re.compile(r"(?i)(?:^|_)(told|tells?|heard|hears?|said|anew|whoever|goes_on|at_hand)(?=_|$)")
WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("words.json").read_text())
FOUND = {
    kind: re.compile("|".join(words) if kind == "Chinese" else rf"(?i)\b(?:{'|'.join(words)})s?\b")
    for kind, words in WORDS.items()
}
NO_PROSE = re.compile(r"^```.*?^```|^    \S.*?$|^#.*?$", re.MULTILINE | re.DOTALL)

SUSPECT = re.compile(r"\b(Of|What|Who|That)\b|# (what|who|that)\b")

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


def json_texts(source: str) -> Texts:
    """Values in English or Chinese, one a line."""
    for line, text in enumerate(source.splitlines(), 1):
        yield line, text.partition('": "')[2].strip('",}')


def markdown_texts(source: str, first: int = 1) -> Texts:
    """Paragraphs, list items and cells, without code and headings."""
    source = NO_PROSE.sub(lambda code: "\n" * code[0].count("\n"), source)
    for part in re.finditer(r"(?:(?!\n\s*(?:\n|[-*#>] |\d+\. ))[^|])+", source):
        words = re.sub("`[^`]*`", "`", part[0]).split()
        yield first + source.count("\n", 0, part.start()), " ".join(words).lstrip("-*> 1234567890.")


def names(source: str, variables: bool = False) -> Iterator[tuple[int, str]]:
    """Functions, classes, parameters and variables that a Python file defines; or its variables without a type."""
    tree = ast.parse(source)
    typed = {node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and variables}
    for node in ast.walk(tree):
        if node in typed:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not variables:
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def wrong_words(kind: str, text: str) -> Iterator[str]:
    for found in FOUND[kind].finditer(text):
        fits = (right for wrong, right in WORDS[kind].items() if re.match(rf"(?i){wrong}", found[0]))
        yield f"{found[0]}: say {next(fits)}"


def faults(path: Path) -> Iterator[str]:
    source, folders = path.read_text(), path.parts[-3:-1]
    if "zh" in folders or path.stem.endswith("_zh"):
        plain = re.sub("^```.*?^```|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), source, flags=re.M | re.S)
        for line, text in enumerate(plain.split("\n"), 1):
            yield from (f"{path}:{line}: {fault}" for fault in wrong_words("Chinese", text))
        return
    kinds = ["house", "riddles"] + ["pages"] * ("en" in folders) + ["Chinese"] * (path.suffix == ".json")
    texts = {".py": python_texts, ".json": json_texts, ".md": markdown_texts}.get(path.suffix, cpp_texts)
    suspect = SUSPECT.search(source) or any(FOUND[kind].search(source) for kind in kinds)
    for line, text in texts(source) if suspect else ():  # tokenizing all files takes seconds
        for found in OPENERS.finditer(text):
            if found["end"] != "?":
                yield f"{path}:{line}: begin with the subject: {found[0][:60]}"
        yield from (f"{path}:{line}: {fault}" for kind in kinds for fault in wrong_words(kind, text))
    for line, name in names(source) if path.suffix == ".py" else ():
        if found := PRIVATE_NAMES.search(name):
            yield f"{path}:{line}: {name}: name it without {found[1]}"
    if path.suffix in (".hpp", ".cpp"):
        for line, text in enumerate(source.splitlines(), 1):
            for found in re.finditer(rf"\b(?:{PRONOUNS.pattern})\b", re.sub(r'"[^"]*"|//.*', "", text)):
                yield f"{path}:{line}: {found[0]}: name what it holds"
    if path.suffix == ".py" and "paddlenlp_galvatron" in path.parts:
        for line, name in names(source, variables=True):
            if PRONOUNS.fullmatch(name) or name == "part":
                yield f"{path}:{line}: {name}: name what it holds"
        for line, text in enumerate(source.splitlines(), 1):
            if found := FRAGMENT.search(text):
                yield f"{path}:{line}: begin with a noun: {found[1]}"


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]] or [path for place in PLACES for path in sorted(ROOT.glob(place))]
    found = [fault for path in paths if not path.name.endswith("english.py") for fault in faults(path)]
    sys.exit("\n".join(found) or 0)
