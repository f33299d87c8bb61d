"""Real ranks over gloo: whichever stalls, dies, leaves or raises is named first; what listens; nodes behind a router.

The words are those of test_launch.py and, for two nodes, test_two_launchers.py, where no Paddle is needed to see them.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from two_nodes import ADDRESSES, ALIAS, LISTENS, NO_GPUS, hide_behind_router, two_nodes_or_skip

from paddlenlp_galvatron.launch.processes import Launch, LaunchError, World, launch
from paddlenlp_galvatron.runtime.groups import sentence

WORKER = "tests.distributed.failing_worker"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
END_S = 60.0  # from a rank's fault to the end of all
WAIT_S = 20.0  # for which ranks wait for each other
MBIT_PER_S = 10_000
CASES = {  # by rank or rank and node, and step
    "killed": "{} was ended by signal 9 (SIGKILL){}; its log",
    "segfault": "{} was ended by signal 11 (SIGSEGV){}; its log",
    "stopped": "{} was stopped by a signal",
    "sleeps": "{} did not come to the others, who wait for it",
    "raises": "{} failed{}: ValueError: the reason;",
    "refuses": "field: the reason ({})",
    "leaves": "{} ended with exit code 0 before its work was done{}; its log",
    "vanishes": "{} ended with exit code 0 before its work was done{}; its log",
}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_launch_listens_on_the_loopback_alone(tmp_path):
    seen: set[str] = set()
    both_seen = tmp_path / "seen"  # the store, and gloo of a rank, which listens until its peer has come: it comes then
    with Launch(WORKER, [f"until {both_seen}", "start", "0"], World(2), tmp_path / "log", TIMEOUT_S) as running:
        for _ in running.wait():
            for pid in [os.getpid(), *(rank.process.pid for rank in running._ranks.ranks)]:
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


@pytest.mark.slow
@pytest.mark.started("what the system says of a rank is that of a program")
@pytest.mark.parametrize("how", CASES)
def test_a_rank_is_named_for_what_it_did(tmp_path, how):
    with pytest.raises(LaunchError) as caught:
        launch(WORKER, [how, "step", "1"], 3, tmp_path, TIMEOUT_S, wait_s=WAIT_S)
    ended, went_wrong = time.time(), re.search(r"^goes wrong at (\S+)$", (tmp_path / "workerlog.1").read_text(), re.M)
    assert went_wrong and ended - float(went_wrong[1]) < END_S
    first = str(caught.value).splitlines()[0]
    assert first.startswith(CASES[how].format("rank 1", " in step 2"))
    assert how == "refuses" or "; ranks 0, 2 waited in all_reduce of ranks 0, 1, 2 in step 2" in first
    assert "gloo" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.started("what the system says of a rank is that of a program")
@pytest.mark.parametrize("how", ["killed", "stopped", "leaves"])
def test_a_rank_is_named_before_all_have_started(tmp_path, how):
    with pytest.raises(LaunchError) as caught:
        launch(WORKER, [how, "start", "1"], 3, tmp_path, TIMEOUT_S)
    assert str(caught.value).startswith(CASES[how].format("rank 1", ""))


LAUNCH = f"""{NO_GPUS}
from paddlenlp_galvatron.cli.main import exit_code_of
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.launch.nodes import Nodes
folder, how, who, address, port, node = sys.argv[1:]
nodes = Nodes(2, int(node), address, int(port))
work = lambda: launch({WORKER!r}, [how, "step", who], 1, folder + "/log", {TIMEOUT_S}, nodes, wait_s={WAIT_S})
sys.exit(exit_code_of(work))
"""


class OnBoth:
    """The same command on two nodes, with a rank each."""

    def __init__(self, stack: ExitStack, folder: Path, port: int, how: str, who: int, alias: str = ""):
        """`alias`: how much of the first node is reached at its alias alone, "port" or "all"; empty: it has none."""
        self.nodes = two_nodes_or_skip(stack, MBIT_PER_S)
        if alias:
            hide_behind_router(stack, self.nodes, port, alone=alias == "all")
        self._reported, self._log = [folder / f"printed.{node}" for node in (0, 1)], folder / "log"
        address = ALIAS if alias else ADDRESSES[0]
        words = [sys.executable, "-c", LAUNCH, str(folder), how, str(who), address, str(port)]
        self.commands = []
        for number, node in enumerate(self.nodes):
            out = stack.enter_context(self._reported[number].open("wb"))
            environment = os.environ | {"GALVATRON_TOKEN": "of both"}
            self.commands.append(node.start([*words, str(number)], stdout=out, stderr=out, env=environment))
            stack.callback(self.commands[-1].wait)
            stack.callback(self.commands[-1].kill)

    def first_line(self, node: int) -> str:
        """Lines of the errors of a node's command, when it has ended."""
        assert self.commands[node].wait(TIMEOUT_S) != 0
        lines = self._reported[node].read_text(errors="replace").splitlines()
        return next(line for line in lines if line.startswith("error: "))


@pytest.mark.slow
def test_a_first_node_behind_a_router_is_met_at_the_address_that_others_know(tmp_path):
    with ExitStack() as stack:
        both = OnBoth(stack, tmp_path, 29_573, "pauses", 1, alias="port")
        assert [command.wait(TIMEOUT_S) for command in both.commands] == [0, 0]


@pytest.mark.slow
def test_nodes_that_a_router_keeps_apart_are_named(tmp_path):
    with ExitStack() as stack:
        both = OnBoth(stack, tmp_path, 29_574, "pauses", 1, alias="all")
        for node in (0, 1):
            assert re.match(r"error: MASTER_ADDR: node ([01]) does not reach node (?!\1)", both.first_line(node))
