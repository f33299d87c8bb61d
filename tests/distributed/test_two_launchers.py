"""A fault of a rank, a node or the link ends the commands on both nodes, which name it, over any transport.

The ranks here wait without end, as NCCL's do, and need no Paddle; test_launch.py has the cases of one node. All
cases happen at once, each on two nodes of its own: most of their time is silence that must be sure.
"""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from two_nodes import ADDRESSES, ALIAS, LINK, NO_GPUS, Node, hide_behind_router, two_nodes_or_skip

PORT, MBIT_PER_S = 29_580, 1000
READY_S = 300.0  # in which ranks begin, on a busy machine
END_S = 60.0  # from the fault to the end on both nodes
RANK = """
import os, signal, sys, time
from pathlib import Path
from paddlenlp_galvatron.launch import status
how, who, rank = *sys.argv[1:], os.environ["PADDLE_TRAINER_ID"]
status.begin()
status.enter(3)
if rank == who:
    print("begun", flush=True)
    other = Path(f"log/workerlog.{1 - int(rank)}")
    while not (other.exists() and "begun" in other.read_text()):
        time.sleep(0.2)
    time.sleep(2)  # its launcher has told so
    if how == "raises":
        status.failed(status.RankOutcome.FAILED, "ValueError: the reason")
    if how in ("dies", "stops"):
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    if how in ("raises", "leaves"):
        os._exit(how == "raises")
    time.sleep(600)
with status.waiting("all_reduce of ranks 0, 1"):
    print("begun", flush=True)
    time.sleep(600)
"""
LAUNCH = f"""{NO_GPUS}
from paddlenlp_galvatron.cli.main import exit_code_of
from paddlenlp_galvatron.launch import processes
from paddlenlp_galvatron.launch.nodes import Nodes
how, who, wait_s, address, port, node = sys.argv[1:]
processes.WAIT_S = float(wait_s)
nodes = Nodes(2, int(node), address, int(port))
sys.exit(exit_code_of(lambda: processes.launch("rank.py", [how, who], 1, "log", 600, nodes)))
"""
UNHEARD = ("error: node 1 has sent nothing for 20 s", "error: node 0 ({}:29580) has sent nothing for 20 s")
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "ended": signal.SIGTERM}
WAITED = "; {} waited in all_reduce of ranks 0, 1 in step 4"


class Case(NamedTuple):
    """A fault, its rank or node, and how the first line of node 0's errors, and of node 1's, begins; None: its
    command is gone, frozen or signalled."""

    how: str
    who: int
    says: tuple[str | None, str | None]
    alias: bool = False  # node 0 is known by another address than its interface's

    @property
    def of_rank(self) -> bool:
        return self.how in ("dies", "stops", "raises", "leaves", "sleeps")


def by_rank(how: str, who: int, says: str, alias: bool = False) -> Case:
    return Case(how, who, (f"error: rank {who} of node {who} {says}",) * 2, alias)


CASES = {
    "rank 1 dies": by_rank("dies", 1, "was ended by signal 9 (SIGKILL) in step 4; its log: "),
    "rank 0 dies": by_rank("dies", 0, "was ended by signal 9 (SIGKILL) in step 4; its log: "),
    "rank 1 stops": by_rank("stops", 1, "was stopped by a signal (process "),
    "rank 0 stops": by_rank("stops", 0, "was stopped by a signal (process "),
    "rank 1 raises": by_rank("raises", 1, "failed in step 4: ValueError: the reason; its log: "),
    "rank 1 leaves": by_rank("leaves", 1, "ended with exit code 0 before its work was done in step 4; its log: "),
    "rank 1 sleeps": by_rank("sleeps", 1, "did not come to the others, who wait for it: it has computed for "),
    "node 1 killed": Case("killed", 1, (UNHEARD[0], None)),
    "node 0 killed": Case("killed", 0, (None, UNHEARD[1])),
    "node 1 frozen": Case("frozen", 1, (UNHEARD[0], None)),
    "node 0 frozen": Case("frozen", 0, (None, UNHEARD[1])),
    "node 1 ended": Case("ended", 1, ("error: node 1: its command was ended", None)),
    "node 0 ended": Case("ended", 0, (None, "error: node 0: its command was ended")),
    "link cut": Case("cut", 1, UNHEARD),
    "nothing reaches node 1": Case("unheard", 0, UNHEARD),
    "nothing reaches node 0": Case("unheard", 1, UNHEARD),
    "rank 1 stops, node 0 behind a router": by_rank("stops", 1, "was stopped by a signal (process ", alias=True),
    "node 0 behind a router killed": Case("killed", 0, (None, UNHEARD[1]), alias=True),
}


class End(NamedTuple):
    """How a case ended."""

    stated: list[str]  # first line of each node's errors
    took_s: float
    listened: list[set[tuple[str, int]]]  # of each node


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    with ExitStack() as stack:
        folders = {name: tmp_path_factory.mktemp("case") for name in CASES}
        nodes = {name: two_nodes_or_skip(stack, MBIT_PER_S) for name in CASES}
        with ThreadPoolExecutor(len(CASES)) as pool:
            yield dict(zip(CASES, pool.map(end_of, folders.values(), nodes.values(), CASES.values()), strict=True))


def end_of(folder: Path, nodes: tuple[Node, Node], case: Case) -> End:
    """Let it happen."""
    (folder / "rank.py").write_text(RANK)
    environment = os.environ | {"GALVATRON_TOKEN": "of both", "PYTHONPATH": str(Path(__file__).parents[2])}
    wait_s = 10 if case.how == "sleeps" else 1800
    who = case.who if case.of_rank else "nobody"
    words = [sys.executable, "-c", LAUNCH, case.how, who, wait_s, ALIAS if case.alias else ADDRESSES[0], PORT]
    with ExitStack() as stack:
        if case.alias:
            hide_behind_router(stack, nodes, PORT, alone=True)
        commands, files = [], [folder / f"printed.{number}" for number in (0, 1)]
        for number, node in enumerate(nodes):
            out = stack.enter_context(files[number].open("wb"))
            settings = {"stdout": out, "stderr": out, "cwd": folder, "env": environment}
            commands.append(node.start([*map(str, words), str(number)], **settings))
            stack.callback(commands[-1].wait)
            stack.callback(commands[-1].kill)
        logs = [folder / "log" / f"workerlog.{rank}" for rank in (0, 1)]
        deadline = time.monotonic() + READY_S
        while not all(log.exists() and "begun" in log.read_text() for log in logs):
            assert time.monotonic() < deadline and all(command.poll() is None for command in commands), folder
            time.sleep(0.2)
        time.sleep(3)  # until each launcher knows the other
        listened = [node.listens() for node in nodes]
        began = time.monotonic()
        if case.how in SIGNALS:
            commands[case.who].send_signal(SIGNALS[case.how])
        elif case.how == "cut":
            nodes[case.who].run(["ip", "link", "set", LINK, "down"])
        elif case.how == "unheard":
            nodes[case.who].lose_what_goes_to(ADDRESSES[1 - case.who])
        for command, says in zip(commands, case.says, strict=True):
            assert says is None or command.wait(READY_S) == 1
        took_s = time.monotonic() - began
        errors = [[line for line in file.read_text().splitlines() if line.startswith("error: ")] for file in files]
        return End([lines[0] if lines else "" for lines in errors], took_s, listened)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_commands_end_and_name_what_befell(ends, name):
    case, end = CASES[name], ends[name]
    for says, stated in zip(case.says, end.stated, strict=True):
        if says is not None:
            assert stated.startswith(says.format(ALIAS if case.alias else ADDRESSES[0]))
            waiting = WAITED.format(f"rank {1 - case.who}" if case.of_rank else r"ranks? [01, ]+")
            assert case.how == "ended" or re.search(waiting, stated)
    assert end.took_s < END_S


@pytest.mark.slow
def test_a_launch_on_two_nodes_listens_at_the_first_ones_address_and_port_alone(ends):
    assert ends["link cut"].listened == [{(ADDRESSES[0], PORT)}, set()]
