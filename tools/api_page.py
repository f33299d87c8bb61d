"""Writes docs/*/api.md: the reference of planning in Python, from the signatures and docstrings of `api.py`.

python tools/api_page.py           write both pages
python tools/api_page.py --check   exit code 1 where they are not current
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from pages import write_or_check

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "paddlenlp_galvatron" / "api.py"
FIRST = {
    "en": """# In Python

    import paddlenlp_galvatron as galvatron

    found = galvatron.search("qwen2.5-7b", device="h100-80gb", gpus=8)
    found.plan.save("plan.json")

Answers are one line in Python and a table in a notebook (`examples/plan.ipynb`).
""",
    "zh": """# 在 Python 中

    import paddlenlp_galvatron as galvatron

    found = galvatron.search("qwen2.5-7b", device="h100-80gb", gpus=8)
    found.plan.save("plan.json")

结果在 Python 中显示为一行，在笔记本中显示为表格。以下说明取自代码，为英文。
""",
}


def main() -> int:
    return write_or_check({ROOT / "docs" / language / "api.md": page(language) for language in FIRST}, "api.py says")


def page(language: str) -> str:
    """The whole page."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    parts = [FIRST[language]]
    public = [node for node in tree.body if not getattr(node, "name", "_").startswith("_")]
    for node in sorted(public, key=lambda node: isinstance(node, ast.ClassDef)):  # functions first
        if isinstance(node, ast.ClassDef):
            parts.append(f"## {node.name}\n\n{help_of(node)}\n")
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                    parts.append(f"{called(one)}{f': {help_of(one)}' if help_of(one) else ''}\n")
        elif isinstance(node, ast.FunctionDef):
            parts.append(f"## {node.name}\n\n    {called(node).strip('`')}\n\n{help_of(node)}\n")
    return "\n".join(parts)


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
