"""Files that a contributor's tools read (workflows, hooks, templates), and names of classes."""

import ast
import re
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_files_in_yaml_are_whole_and_name_files_that_are_there():
    paths = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    text = "\n".join(path.read_text() for path in paths if yaml.safe_load(path.read_text()))
    named = set(re.findall(r"(?:tools|\.ci)/[\w.]+", text))
    assert len(paths) == 6 and named and all((ROOT / name).exists() for name in named)
    targets = re.findall(r"run: make (\w+)", text)
    assert targets and all(
        re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets
    )


def test_no_two_classes_share_a_name():
    trees = (ast.parse(path.read_text()) for path in ROOT.glob("paddlenlp_galvatron/**/*.py"))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert len(names) > 300 and [name for name, times in names.items() if times > 1] == []
