"""docs/*/explain.md names every option and every key of the commands that explain a plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_galvatron.report.origin import OriginOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_has_every_option(language):
    text = (ROOT / "docs" / language / "explain.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {*OriginOptions.model_fields, "json", "config"} <= rows
