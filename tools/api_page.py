"""Writes docs/*/api.md: the reference of Python's part, from signatures, fields and docstrings of the code. The Chinese
page says what api_zh.json has for each English text.

python tools/api_page.py           write both pages
python tools/api_page.py --check   exit code 1 where they are not current
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

from pages import write_or_check

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "paddlenlp_galvatron"
CHINESE = json.loads(Path(__file__).with_name("api_zh.json").read_text(encoding="utf-8"))  # by the English
FIRST = """# In Python

    import paddlenlp_galvatron as galvatron

    found = galvatron.search("qwen2.5-7b", device="h100-80gb", gpus=8)
    found.plan.save("plan.json")

Functions, `Plan` and errors are in `paddlenlp_galvatron`; only training needs Paddle. An option of a command is a
keyword of the function of its name, under any of its names: [fit](commands.md#fit), [search](commands.md#search),
[explain](commands.md#explain), but for those that name data and outputs; `help(galvatron.search)` lists them.
Answers are one line in Python and a table in a notebook (`examples/plan.ipynb`).

`_s` are seconds, `_ms` milliseconds, `_mib` MiB (2^20 bytes), `_gb` 10^9 bytes.
"""
# Heading -> the public names of files.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Functions": {"api.py": ("fit", "search", "explain")},
    "Answers": {
        "api.py": ("Fits", "Found", "Explained", "Plan", "Shown"),
        "planner/result.py": ("SearchResult", "Candidate", "Need", "Job"),
        "planner/hints.py": ("Hint",),
        "cost_model/costs.py": ("Prediction",),
    },
    "Errors": {"base/errors.py": ("GalvatronError", "UserError", "Infeasible")},
    "A plan's fields": {"plan/strategy.py": ("Plan", "LayerStrategy", "VocabStrategy", "Assumptions")},
    "Training": {
        "training/paddlenlp/trainer.py": ("GalvatronTrainer",),
        "training/paddlenlp/arguments.py": ("settings_of",),
    },
}
WHOLE = {"api.py", "training/paddlenlp/trainer.py"}  # whose methods are for users; of the others, attributes


Translate = Callable[[str], str]  # an English text, in the language of a page


def main() -> int:
    # A KeyError names the English text that api_zh.json lacks.
    languages: dict[str, Translate] = {"en": str, "zh": lambda text: text and CHINESE[text]}
    made = {ROOT / "docs" / language / "api.md": page(translate) for language, translate in languages.items()}
    return write_or_check(made, "the code")


def page(translate: Translate) -> str:
    """The whole page."""
    parts = [translate(FIRST)]
    for heading, files in SECTIONS.items():
        parts.append(f"## {translate(heading)}\n")
        for file, names in files.items():
            source = (PACKAGE / file).read_text(encoding="utf-8")
            tree = {getattr(node, "name", ""): node for node in ast.parse(source).body}
            for name in names:
                parts += described(tree[name], file, source.splitlines(), translate)
    return "\n".join(parts)


def described(node: ast.stmt, file: str, lines: list[str], translate: Translate) -> list[str]:
    """A function, or a class with its fields and methods."""
    if isinstance(node, ast.FunctionDef):
        return [f"### {node.name}\n\n    {called(node).strip('`')}\n\n{translate(help_of(node))}\n"]
    assert isinstance(node, ast.ClassDef)
    module = file.removesuffix(".py").replace("/", ".")
    name = node.name if file in ("api.py", "base/errors.py") else f"{module}.{node.name}"
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    helps = [translate(help_of(one)) for one in (node, made) if one]
    parts = [f"### {name}\n\n{' '.join(filter(None, helps))}\n"]
    fields = [
        one for one in node.body if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    if fields:
        rows = [
            f"| `{ast.unparse(one.target)}` | `{cell(one.annotation)}` | {translate(comment(one, lines))} |".replace(
                "|  |", "| |"
            )
            for one in fields
        ]
        parts.append("\n".join((f"| {translate('field | type')} | |", "|---|---|---|", *rows)) + "\n")
    for one in node.body:
        whole = file in WHOLE or "property" in map(ast.unparse, getattr(one, "decorator_list", ()))
        if whole and isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and help_of(one):
            parts.append(f"{called(one)}{translate(': ')}{translate(help_of(one))}\n")
    return parts


def comment(field: ast.AnnAssign, lines: list[str]) -> str:
    """The comment of a field, where its name does not say all."""
    return lines[(field.end_lineno or field.lineno) - 1].partition("  #")[2].strip().replace("|", "\\|")


def cell(node: ast.expr) -> str:
    return ast.unparse(node).replace("|", "\\|")


def help_of(node: ast.ClassDef | ast.FunctionDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def called(node: ast.FunctionDef) -> str:
    """As it is called, or read."""
    names = [ast.unparse(one) for one in node.decorator_list]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in names:
        return f"`.{node.name}{result}`"
    first = "." if node.args.args and node.args.args[0].arg in ("self", "cls") else ""
    words = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
    return f"`{first}{node.name}({words}){result}`"


if __name__ == "__main__":
    sys.exit(main())
