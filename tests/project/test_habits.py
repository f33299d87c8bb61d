"""Files that a contributor's tools read: workflows, hooks, templates, images."""

import re
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from commit_message import faults

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("plan: Read comments\n\nPeople write them.", []),
        ("runtime/units: Keep two windows\n\nThe others wait.\n# a comment of git's", []),
        ("Merge branch 'main'", []),
        ("Read comments\n\nPeople write them.", ["begin with the area"]),
        ("plan: reads comments\n\nPeople write them.", ["begin with the area"]),
        (f"plan: Read {'x' * 70}\n\nWhy.", ["at most 72"]),
        ("plan: Read comments", ["say in a body why"]),
        ("plan: Read comments\nPeople write them.", ["second line empty"]),
    ],
)
def test_commit_messages(message, found):
    stated = list(faults(message))
    assert len(stated) == len(found) and all(part in fault for part, fault in zip(found, stated, strict=True))


def test_files_in_yaml_are_whole_and_name_files_that_are_there():
    paths = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    text = "\n".join(path.read_text() for path in paths if yaml.safe_load(path.read_text()))
    named = set(re.findall(r"(?:tools|\.ci)/[\w.]+", text))
    assert len(paths) == 6 and named and all((ROOT / name).exists() for name in named)
    targets = re.findall(r"run: make (\w+)", text)
    assert targets and all(
        re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets
    )


def test_images_have_the_entry_point_and_a_base(tmp_path):
    for path in ROOT.glob("docker/*.Dockerfile"):
        lines = [line.split()[0] for line in path.read_text().splitlines() if line and not line.startswith(("#", " "))]
        assert set(lines) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"} and lines[-1] == "ENTRYPOINT"


def test_the_citation_has_the_version():
    version = re.search(r'"(.*)"', (ROOT / "paddlenlp_galvatron" / "version.py").read_text())
    assert version and yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version[1]
