"""Published runs: the analytic path's error, and the documents that show it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    """The benchmark's functions, and its rows."""
    found = runpy.run_path(str(ROOT / "benchmarks" / "published.py"))
    return found | {"rows": [found["row"](run) for run in found["RUNS"]]}


def test_step_times_are_within_twenty_percent_and_ten_on_average(benchmark):
    assert len(benchmark["rows"]) == 24
    assert benchmark["summary"](benchmark["rows"])["mean"] <= 0.10
    for row in benchmark["rows"]:
        assert abs(row["error"]) <= 0.20, row


def test_the_documents_show_what_the_command_prints(benchmark):
    printed = list(benchmark["table"](benchmark["rows"]))
    mean, median, most = (
        f"{error:.1%}".replace("%", " %") for error in benchmark["summary"](benchmark["rows"]).values()
    )
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "benchmarks.md").read_text()
        missing = [line for line in printed if line not in page]
        assert not missing, missing
        told = re.search(r"\*\*.*?([\d.]+ %).*?([\d.]+ %).*?([\d.]+ %)\*\*", page)
        assert told and told.groups() == (mean, median, most)
