"""Counts the lines of code, by package, and their change against `main`; `make lint` runs it.

A line of code is neither blank nor a comment nor part of a docstring: to explain costs nothing. It fails above the
ceilings of `[tool.size]` in pyproject.toml, which only fall: a commit that deletes code lowers them.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("paddlenlp_galvatron", "search_engine", "benchmarks", "tools", "scripts", "llm", "tests")
SUFFIXES = (".py", ".pyi", ".cpp", ".hpp", ".h", ".sh")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CPP_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def code_lines(name: str, text: str) -> int:
    if name.endswith((".cpp", ".hpp", ".h")):
        text = CPP_COMMENT.sub(lambda found: found[1] or "", text)
    docstrings = set(_docstring_lines(text)) if name.endswith((".py", ".pyi")) else set()
    hashes = () if name.endswith((".cpp", ".hpp", ".h")) else ("#",)  # in C++ a directive, not a comment
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for number, line in lines if line and not line.startswith(hashes) and number not in docstrings)


def _docstring_lines(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def sizes(files: Mapping[str, str]) -> Counter[str]:
    """Lines of code by package of `paddlenlp_galvatron`, and by other folder; of files by name."""
    counted: Counter[str] = Counter()
    for name, text in files.items():
        folders = Path(name).parts[:-1]
        inner = folders[:2] if folders and folders[0] == "paddlenlp_galvatron" else folders[:1]
        if name.endswith(SUFFIXES) and folders and folders[0] in PLACES:
            counted["/".join(inner)] += code_lines(name, text)
    return counted


def in_this_tree() -> dict[str, str]:
    """The files that git knows or would add: tests and users make others, such as scripts/profile_p2p.sh."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PLACES]
    try:
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for place in PLACES for path in (ROOT / place).rglob("*")]
    found = sorted(path for path in files if path.suffix in SUFFIXES and path.is_file())
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def in_main() -> dict[str, str]:
    """The files of the branch `main`; none where there is no git or no such branch."""
    try:
        archive = subprocess.run(["git", "archive", "main", *PLACES], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [one for one in files if one.isfile() and one.name.endswith(SUFFIXES)]
        return {one.name: file.read().decode() for one in members if (file := files.extractfile(one))}


def above(counted: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    """A line for each ceiling that is passed: `tests` has one, everything else together another."""
    tests = counted.get("tests", 0)
    found = {"tests": tests, "code": sum(counted.values()) - tests}
    return [
        f"{name}: {found[name]:,} lines, {found[name] - most:,} above the ceiling ([tool.size] in pyproject.toml); "
        "delete as many elsewhere"
        for name, most in ceilings.items()
        if found[name] > most
    ]


def main() -> int:
    now, before = sizes(in_this_tree()), sizes(in_main())
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    for name in sorted(now.keys() | before.keys(), key=lambda name: (name == "tests", -now[name])):
        change = now[name] - before[name]
        print(f"{name:32}{now[name]:7,}" + (f"{change:+7,}" if before and change else ""))
    code, was = (sum(counts.values()) - counts["tests"] for counts in (now, before))
    print(f"{'all but tests':32}{code:7,}" + (f"{code - was:+7,}" if before else "") + f" of {ceilings['code']:,}")
    passed = above(now, ceilings)
    print(*passed, sep="\n", end="\n" if passed else "", file=sys.stderr)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
