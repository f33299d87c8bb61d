"""Published runs: the analytic path's error, and the documents that show it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def reprinted(*words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "published.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return dict(json.loads(reprinted("--json")))


def test_step_times_are_within_twenty_percent_and_ten_on_average(told):
    assert len(told["rows"]) == 24
    assert told["errors"]["mean"] <= 0.10
    for row in told["rows"]:
        assert abs(row["error"]) <= 0.20, row


def test_the_documents_show_what_the_command_prints():
    printed = reprinted()
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "benchmarks.md").read_text()
        missing = [line for line in printed.splitlines() if line.startswith(("| Nara", "| Kort")) and line not in page]
        assert not missing, missing
