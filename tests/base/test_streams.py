"""A command whose output nobody reads any more does its work; one that cannot write it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "paddlenlp_galvatron.cli.main", "plan", "schema"]  # more than a pipe holds


def test_who_has_seen_enough_ends_no_command():
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout and command.stderr
        assert command.stdout.readline() == b"{\n"
        command.stdout.close()
        assert (command.wait(60), command.stderr.read()) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_a_line():
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr == b"error: the output cannot be written: No space left on device\n"
