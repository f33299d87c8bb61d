"""Files that a contributor's tools read: workflows, hooks, templates."""

import re
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
