"""Checks the English of docstrings, comments, messages and pages, names in code, and the terms of Chinese pages;
`make lint` runs it.

    python tools/english.py [FILE ...]        no FILE: the whole project

A sentence begins with its subject, so with none of OPENERS; questions may. HOUSE_WORDS and RIDDLES have standard words,
CHINESE has one term for each thing: the one that PaddleNLP's documentation uses.
"""

from __future__ import annotations

import ast
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
    *("benchmarks/*.py", "tools/*.py", "docs/en/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/zh/*.md", "README_zh.md", "tools/commands_zh.json"),
)
LATER = (
    "runtime",
    "cost_model",
    "planner",
    "plan",
    "search_engine",
)  # riddles and names not mended yet
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
RIDDLES = {
    "told|tells?|telling": "given, shown, reported, or says",
    "heard|hears?": "received, or receives",
    "said": "given",
    "beside": "next to, with, during or in addition to",
    "at hand": "available",
    "asked for": "requested, or on",
    "unless said": "by default",
    "left out of account": "ignored",
    "goes on|go on|going on|went on": "continues, or is resumed",
    "whatever": "any, or for any",
    "whoever": "a person who, or who",
    "fullest": "busiest, or with the highest peak",
    "leanest": "that needs the least memory",
    "anew": "again",
    "alike": "the same, or equally",
    "what holds": "what applies",
}
PAGE_RIDDLES = {r"(?<!network )(?<!model )cards?": "GPU"}
PRIVATE_NAMES = re.compile(r"(?i)(?:^|_)(told|tells?|heard|hears?|said|anew|whoever|goes_on|at_hand)(?=_|$)")
CHINESE = {  # wrong or second terms: the one to write
    "全局批量|全局批次大小": "全局批大小",
    "批量": "批大小",
    "计划": "方案",
    "(?<!\\w)micro-batch(?=[\u4e00-\u9fff])|微批(?!次)": "微批次",
    "融合 kernel": "融合算子",
    "张 GPU|块 GPU": "张卡",
    "数据手册": "硬件参数文件",
    "重算": "重计算",
    "梯度累加": "梯度累积",
    "带专家的": "MoE",
    "词表层": "词嵌入与 LM head",
    "多块层": "虚拟流水线",
    "(?<!断点)(?<!连)续训|继续训练": "恢复训练",
    "微调(?<!精调（微调)": "精调",
    "死去": "异常退出",
    "计价|定价": "预测，或代价",
    "报名拒绝": "报错并指明参数名",
}
HOUSE_WORD = re.compile(rf"(?i:\b({'|'.join(HOUSE_WORDS)})s?\b)")
RIDDLE, PAGE_RIDDLE = (re.compile(rf"(?i)\b(?:{'|'.join(words)})\b") for words in (RIDDLES, PAGE_RIDDLES))
CHINESE_TERM = re.compile("|".join(CHINESE))
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


def names(source: str) -> Iterator[tuple[int, str]]:
    """Functions, classes, parameters and variables that a Python file defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def standard(words: dict[str, str], found: str) -> str:
    """The words to use in place of `found`."""
    return next(right for wrong, right in words.items() if re.fullmatch(wrong, found, re.IGNORECASE))


def chinese_faults(path: Path, source: str) -> Iterator[str]:
    """Terms outside code that are not those of the glossary."""
    for line, text in enumerate(re.sub("^```.*?^```|`[^`\n]*`", blank, source, flags=re.M | re.S).split("\n"), 1):
        for found in CHINESE_TERM.finditer(text):
            right = next(right for wrong, right in CHINESE.items() if re.match(wrong, text[found.start() :]))
            yield f"{path}:{line}: {found[0]}: 写作 {right}"


def blank(code: re.Match[str]) -> str:
    return "\n" * code[0].count("\n")


def faults(path: Path) -> Iterator[str]:
    source = path.read_text()
    if path.suffix == ".json" or "zh" in path.stem.split("_") or path.parent.name == "zh":
        yield from chinese_faults(path, source)
        return
    later = path.parent.name in LATER or path.parent.parent.name in LATER
    page = path.suffix == ".md" and path.parent.name == "en"
    tables = [
        (HOUSE_WORD, HOUSE_WORDS),
        *([] if later else [(RIDDLE, RIDDLES)]),
        *([(PAGE_RIDDLE, PAGE_RIDDLES)] if page else []),
    ]
    texts = {".py": python_texts, ".md": markdown_texts}.get(path.suffix, cpp_texts)
    suspect = SUSPECT.search(source) or any(pattern.search(source) for pattern, _ in tables)
    for line, text in texts(source) if suspect else ():  # tokenizing all files takes seconds
        for found in OPENERS.finditer(text):
            if found["end"] != "?":
                yield f"{path}:{line}: begin with the subject: {found[0][:60]}"
        for pattern, words in tables:
            for found in pattern.finditer(text):
                yield f"{path}:{line}: {found[0]}: say {standard(words, found[0])}"
    if path.suffix == ".py" and not later:
        for line, name in names(source):
            if found := PRIVATE_NAMES.search(name):
                yield f"{path}:{line}: {name}: name it without {found[1]}"


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]] or [path for place in PLACES for path in sorted(ROOT.glob(place))]
    found = [fault for path in paths if path.name != Path(__file__).name for fault in faults(path)]
    sys.exit("\n".join(found) or 0)
