"""docs/*/explain.md names every option and every key of the commands that explain a plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from paddlenlp_galvatron.cli import report
from paddlenlp_galvatron.report.origin import OriginOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_has_every_option(language):
    text = (ROOT / "docs" / language / "explain.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {*OriginOptions.model_fields, "json", "config"} <= rows
    of_report = {
        option.opts[0].removeprefix("--") for option in get_command(report.app).params if option.name != "help"
    }
    assert not [name for name in of_report if f"`{name}`" not in text]
