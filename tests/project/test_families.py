"""CONTRIBUTING's "Add a family" lists the files that name every trained family: no other one, and none is forgotten."""

import re
from pathlib import Path

import pytest

from paddlenlp_galvatron.model import TRAINED

ROOT = Path(__file__).parents[2]
PLACES = (
    "*.md",
    "docs/*/*.md",
    *(f"{part}/**/*.{end}" for part in ("paddlenlp_galvatron", "tests") for end in ("py", "json")),
)


@pytest.mark.parametrize(
    ("guide", "section"), [("CONTRIBUTING.md", "Add a family"), ("CONTRIBUTING_zh.md", "添加一个模型族")]
)
def test_the_files_of_a_family_are_those_that_name_every_family(guide: str, section: str) -> None:
    text = (ROOT / guide).read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    texts = {str(path.relative_to(ROOT)): path.read_text() for place in PLACES for path in ROOT.glob(place)}
    naming = {path for path, content in texts.items() if set(TRAINED) <= set(re.findall(r"\w+", content))}
    assert set(re.findall(r"`([\w/.]+\.(?:md|py|json))`", text)) == naming
