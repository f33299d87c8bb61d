"""Real ranks over gloo: whichever stalls, dies, leaves or raises is named first, on one node and two; what listens.

The words are those of test_launch.py, where no Paddle is needed to see them.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from two_nodes import ADDRESSES, LINK, two_nodes_or_skip

from paddlenlp_galvatron.launch.processes import Launch, LaunchError, launch
from paddlenlp_galvatron.runtime.groups import sentence

WORKER = "tests.distributed.failing_worker"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
MBIT_PER_S = 10_000
LISTENS = "0A"  # state of a socket in /proc/net/tcp
STOPPED = "rank 1 was stopped by a signal"
LEFT = "rank 1 ended with exit code 0 before its work was done"
CASES = {
    "killed": "rank 1 was ended by signal 9 (SIGKILL)",
    "segfault": "rank 1 was ended by signal 11 (SIGSEGV)",
    "stopped": STOPPED,
    "sleeps": "rank 1 did not come to the others, who wait for it",
    "raises": "rank 1 failed: ValueError: the reason;",
    "refuses": "field: the reason (rank 1)",
    "leaves": LEFT,
    "vanishes": LEFT,
}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_launch_listens_on_the_loopback_alone(tmp_path):
    seen: set[str] = set()
    with Launch(WORKER, ["pauses", "step", "0"], 2, tmp_path, TIMEOUT_S) as running:
        for _ in running.wait():
            for pid in [os.getpid(), *(rank.process.pid for rank in running._crew.ranks)]:
                seen |= listening(pid)
    assert len(seen) >= 2  # the store, and gloo of a rank
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


@pytest.mark.slow
@pytest.mark.usefixtures("begun_ranks")
@pytest.mark.parametrize("how", CASES)
def test_a_rank_is_named_for_what_it_did(tmp_path, how):
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(WORKER, [how, "step", "1"], 3, tmp_path, TIMEOUT_S)
    assert str(caught.value).startswith(CASES[how])
    assert "gloo" not in str(caught.value)
    assert time.monotonic() - start < TIMEOUT_S


@pytest.mark.slow
@pytest.mark.usefixtures("begun_ranks")
@pytest.mark.parametrize("how", ["killed", "stopped", "leaves"])
def test_a_rank_is_named_before_all_have_started(tmp_path, how):
    with pytest.raises(LaunchError) as caught:
        launch(WORKER, [how, "start", "1"], 3, tmp_path, TIMEOUT_S)
    assert str(caught.value).startswith(CASES[how])


LAUNCH = f"""
import sys
from paddlenlp_galvatron.cli.main import exit_code_of
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.launch.nodes import Nodes
folder, how, who, port, node = sys.argv[1:]
nodes = Nodes(2, int(node), {ADDRESSES[0]!r}, int(port))
work = lambda: launch({WORKER!r}, [how, "step", who], 1, folder + "/log", {TIMEOUT_S}, nodes)
sys.exit(exit_code_of(work))
"""


class OnBoth:
    """The same command on two nodes, with a rank each."""

    def __init__(self, stack: ExitStack, folder: Path, port: int, how: str, who: str):
        self.nodes = two_nodes_or_skip(stack, MBIT_PER_S)
        self._said = [folder / f"said.{node}" for node in (0, 1)]
        words = [sys.executable, "-c", LAUNCH, str(folder), how, who, str(port)]
        self.commands = []
        for number, node in enumerate(self.nodes):
            out = stack.enter_context(self._said[number].open("wb"))
            environment = os.environ | {"GALVATRON_TOKEN": "of both"}
            self.commands.append(node.start([*words, str(number)], stdout=out, stderr=out, env=environment))
            stack.callback(self.commands[-1].kill)

    def first_line(self, node: int) -> str:
        """Of the errors of a node's command, when it has ended."""
        assert self.commands[node].wait(TIMEOUT_S) != 0
        lines = self._said[node].read_text(errors="replace").splitlines()
        return next(line for line in lines if line.startswith("error: "))

    def wait_for_ranks(self, folder: Path) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while "connected" not in "".join(path.read_text(errors="replace") for path in folder.glob("log/*.1")):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "sleeps", "raises", "leaves"])
def test_on_two_nodes_both_commands_name_the_rank(tmp_path, how):
    with ExitStack() as stack:
        both = OnBoth(stack, tmp_path, 29_570, how, "1")
        assert both.first_line(0).startswith(f"error: {CASES[how]}")
        assert both.first_line(1).startswith(f"error: {CASES[how]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "survivor", "message"),
    [
        (signal.SIGKILL, 0, "error: node 1 has not been heard of for 20 s"),
        (signal.SIGSTOP, 0, "error: node 1 has not been heard of for 20 s"),
        (signal.SIGTERM, 0, "error: node 1: its command was ended"),
        (signal.SIGKILL, 1, f"error: node 0 ({ADDRESSES[0]}:"),
        ("link", 0, "error: node 1 has not been heard of for 20 s"),
        ("link", 1, f"error: node 0 ({ADDRESSES[0]}:"),
    ],
)
def test_a_node_that_dies_freezes_or_is_cut_off_is_named(tmp_path, what, survivor, message):
    with ExitStack() as stack:
        both = OnBoth(stack, tmp_path, 29_571, "sleeps", str(1 - survivor))
        both.wait_for_ranks(tmp_path)
        if what == "link":
            both.nodes[1 - survivor].run(["ip", "link", "set", LINK, "down"])
        else:
            both.commands[1 - survivor].send_signal(what)
        assert both.first_line(survivor).startswith(message)
