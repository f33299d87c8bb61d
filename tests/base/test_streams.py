"""A command whose output nobody reads any more does its work; one that cannot write it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "paddlenlp_galvatron.cli.main", "plan", "schema"]


def test_who_has_seen_enough_ends_no_command():
    """As `| head -1` does: nobody reads when the command writes."""
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(COMMAND, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_a_line():
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr == b"error: the output cannot be written: No space left on device\n"
