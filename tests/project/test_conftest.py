"""A test that hangs or crashes is told by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(folder: Path, content: str) -> tuple[int, str]:
    """Exit code and output of pytest on a file, with the suite's conftest and Ctrl-C ignored."""
    (folder / "test_sample.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(TESTS.parent / "pyproject.toml")]
    ran = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder / "test_sample.py")],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return ran.returncode, ran.stdout


def test_a_hang_fails_its_test_and_what_cannot_be_failed_ends_the_run(tmp_path):
    code, said = run(
        tmp_path,
        """
import os, signal, subprocess, sys, time
import conftest, pytest

conftest.STUCK_S = 2

@pytest.mark.timeout(1, method="signal")
def test_waits():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(100)"])

def test_takes_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)

@pytest.mark.timeout(1, method="signal")
def test_is_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(100)
""",
    )
    assert code == 1 and said.startswith("F."), said
    assert "Timeout (0:00:03)!" in said and "in test_is_deaf" in said, said


def test_a_crash_after_paddles_import_is_told_by_the_tests_name(tmp_path):
    pytest.importorskip("paddle")
    code, said = run(
        tmp_path,
        """
import os, signal
import paddle

def test_is_well():
    pass

def test_crashes():
    os.kill(os.getpid(), signal.SIGILL)
""",
    )
    assert code == -signal.SIGILL, said
    assert "Illegal instruction" in said and "in test_crashes" in said, said
