"""Counts the lines of code, by package, and their change against `main`; `make lint` runs it.

A line of code is neither blank nor a comment nor part of a docstring: to explain costs nothing. It fails above the
ceilings of `[tool.size]` in pyproject.toml. A change that deletes code lowers them; one that raises them says so in a
commit message, `Size: +N, because …`, and stays below the owner's figures.

python tools/size.py [FILE]   FILE: a commit message that is about to be used
"""

import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("paddlenlp_galvatron", "search_engine", "benchmarks", "tools", "scripts", "llm", "tests")
SUFFIXES = (".py", ".pyi", ".cpp", ".hpp", ".h", ".sh")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OWNER = ROOT.parent / "shared" / "ceiling.json"  # outside the repository: the owner alone changes it
REASON = re.compile(r"^Size: \+([\d,]+), because \S", re.MULTILINE)
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
    found = sorted(path for path in files if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink())
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


def git(*words: str, root: Path = ROOT) -> str:
    """Output of git; empty where git fails or is missing."""
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def ceilings_in(text: str) -> dict[str, int]:
    return dict(tomllib.loads(text).get("tool", {}).get("size", {}))


def before_change(root: Path = ROOT) -> str:
    """The commit that the change is built on; empty where git knows no earlier one.

    On a branch this is the merge base with `main`; on `main`, the commit before the one that last changed the ceilings.
    """
    main = git("rev-parse", "--verify", "main", root=root) or git("rev-parse", "--verify", "origin/main", root=root)
    base = git("merge-base", "HEAD", main, root=root)
    if base != git("rev-parse", "HEAD", root=root):
        return base
    if git("diff", "HEAD", "-G^(code|tests) = ", "--name-only", "--", "pyproject.toml", root=root):
        return base
    words = ("log", "-1", "--first-parent", "-G^(code|tests) = ", "--format=%H^")
    return git("rev-parse", "--verify", git(*words, "--", "pyproject.toml", root=root), root=root)


def raised(before: Mapping[str, int], now: Mapping[str, int], messages: str) -> list[str]:
    """A line if the ceilings rise by more than the messages of the change give reasons for."""
    rise = sum(max(0, now[name] - most) for name, most in before.items())
    explained = sum(int(number.replace(",", "")) for number in REASON.findall(messages))
    if rise <= explained:
        return []
    return [f"[tool.size] rises by {rise:,}: delete as many lines, or commit with a line `Size: +{rise:,}, because …`"]


def ceiling_faults(now: Mapping[str, int], message: str, root: Path = ROOT, owner: Path = OWNER) -> list[str]:
    """Faults of the ceilings themselves."""
    base = before_change(root)
    before = ceilings_in(git("show", f"{base}:pyproject.toml", root=root)) if base else {}
    limits = json.loads(owner.read_text()) if owner.is_file() else {}
    return raised(before, now, git("log", f"{base}..HEAD", "--format=%B", root=root) + "\n" + message) + [
        f"[tool.size] {name}: {most:,} is above the owner's {limits[name]:,}"
        for name, most in now.items()
        if most > limits.get(name, most)
    ]


def main(arguments: Sequence[str]) -> int:
    now, before = sizes(in_this_tree()), sizes(in_main())
    ceilings = ceilings_in((ROOT / "pyproject.toml").read_text())
    for name in sorted(now.keys() | before.keys(), key=lambda name: (name == "tests", -now[name])):
        change = now[name] - before[name]
        print(f"{name:32}{now[name]:7,}" + (f"{change:+7,}" if before and change else ""))
    code, was = (sum(counts.values()) - counts["tests"] for counts in (now, before))
    print(f"{'all but tests':32}{code:7,}" + (f"{code - was:+7,}" if before else "") + f" of {ceilings['code']:,}")
    message = Path(arguments[0]).read_text(encoding="utf-8") if arguments else ""
    faults = above(now, ceilings) + ceiling_faults(ceilings, message)
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
