"""A launch ends with all its processes, and says which rank failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paddlenlp_galvatron.runtime.launch import LaunchError, launch

SCRIPT = """
import os, signal, sys, time
rank = int(os.environ["PADDLE_TRAINER_ID"])
if rank == 1:
    how = sys.argv[1]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "bad input":
        print("error: the reason")
        sys.exit(2)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "failing_rank.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize(
    ("how", "message", "exit_code"),
    [("killed", "rank 1 was ended by signal 9", 1), ("bad input", "^the reason$", 2)],
)
def test_one_bad_rank_ends_the_launch_and_is_named(tmp_path, how, message, exit_code):
    with pytest.raises(LaunchError, match=message) as caught:
        launch("failing_rank", [how], 3, tmp_path / "log", timeout_s=30)
    assert caught.value.exit_code == exit_code
    assert not running(tmp_path)


def test_a_late_rank_is_named(tmp_path):
    with pytest.raises(LaunchError, match="rank 0, 1 did not end within 1 s"):
        launch("failing_rank", ["sleeps"], 2, tmp_path / "log", timeout_s=1)
    assert not running(tmp_path)


def running(folder: Path) -> list[str]:
    """Processes of this interpreter that still run the module of the folder."""
    wanted = f"PYTHONPATH={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and b"failing_rank" in command and sys.executable.encode() in command:
            found.append(process.name)
    return found
