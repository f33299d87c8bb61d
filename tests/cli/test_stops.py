"""A run that is stopped is no run that is done: for scripts by its exit code, for people by its last line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("codes", "starts"), [("1 137 0", 3), ("2", 1), ("1 143", 2), ("130", 1), ("129", 1)])
def test_the_loop_of_the_documentation_starts_again_after_crashes_alone(tmp_path, language, codes, starts):
    lines = (DOCS / language / "checkpoints.md").read_text().splitlines()
    (loop,) = [line for line in lines if line.startswith("    until galvatron train ")]
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    for name, body in {
        "galvatron": 'echo >> starts; code=$(sed -n "$(wc -l < starts)p" codes); exit ${code:-99}',
        "sleep": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", loop], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=20, check=False)
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
