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


@pytest.mark.parametrize("language", ["en", "zh"])
def test_other_pages_tell_the_same_errors_rounded(benchmark, language):
    mean, _, most = (round(100 * error) for error in benchmark["summary"](benchmark["rows"]).values())
    sentences = {
        "cost_model.md": {
            "en": f"off by {mean} % on average and by {most} % at most",
            "zh": f"平均相差 {mean} %，最多 {most} %",
        },
        "tutorial_no_cluster.md": {
            "en": f"off by {mean} % on average and {most} % at most",
            "zh": f"平均误差 {mean}%，最大 {most}%",
        },
        "profile.md": {
            "en": f"whole runs](benchmarks.md#published-runs) within {most + 1} %",
            "zh": f"不超过 {most + 1} %；其他",
        },
    }
    for name, sentence in sentences.items():
        text = " ".join((ROOT / "docs" / language / name).read_text().split())
        assert sentence[language] in text, name
