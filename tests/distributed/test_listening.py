"""Real ranks over gloo listen on the loopback alone, and their errors are a line."""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from two_nodes import LISTENS

from paddlenlp_galvatron.launch.processes import Launch, World
from paddlenlp_galvatron.runtime.groups import sentence

RANK = """
import os, sys, time
from pathlib import Path
from paddlenlp_galvatron.runtime.groups import run_as_rank, start_world
def main():
    while os.environ["PADDLE_TRAINER_ID"] == "0" and not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    start_world()
run_as_rank(main)
"""


def test_a_launch_listens_on_the_loopback_alone(tmp_path):
    seen: set[str] = set()
    both_seen = tmp_path / "seen"  # the store, and gloo of a rank, which listens until its peer has come: it comes then
    (rank := tmp_path / "rank.py").write_text(RANK)
    with Launch(str(rank), [str(both_seen)], World(2), tmp_path / "log", 600.0) as running:
        for _ in running.wait():
            for pid in [os.getpid(), *(each.process.pid for each in running._ranks.ranks)]:
                seen |= listening(pid)
            if len(seen) >= 2:
                both_seen.touch()
    assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens."""
    own, found = set(), set()
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed by now
                own.add(str(file.readlink()))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTENS and f"socket:[{inode}]" in own:
            address, port = local.split(":")
            found.add(f"{socket.inet_ntoa(struct.pack('<I', int(address, 16)))}:{int(port, 16)}")
    if Path("/proc/net/tcp6").exists():
        lines = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
        found |= {f"v6 {words[1]}" for words in lines if words[3] == LISTENS and f"socket:[{words[9]}]" in own}
    return found


def test_an_error_is_a_line_without_the_stacks_around_it():
    paddle = "\n\n---\nC++ Traceback\n---\n0 f()\n\n---\nError Message Summary:\n---\nInvalidArgumentError: shapes\n"
    assert sentence(ValueError(paddle)) == "ValueError: InvalidArgumentError: shapes"
    layer = 'Traceback (most recent call last):\n  File "x", line 1\nKeyError: 3\n'
    assert sentence(OSError(layer)) == "OSError: KeyError: 3"
    assert sentence(ValueError()) == "ValueError: without a message"
