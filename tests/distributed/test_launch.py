"""A launch ends with all its processes, and first says which rank is to blame, in that rank's own words.

The ranks here compute nothing: they say what ranks say, without Paddle. test_faults.py has real ones.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.base import UserError
from paddlenlp_galvatron.base.writing import scratch_folder
from paddlenlp_galvatron.launch import faults, processes, status, store, watch
from paddlenlp_galvatron.launch.faults import Fault, FaultClassifier, FaultKind, Wait
from paddlenlp_galvatron.launch.nodes import Nodes
from paddlenlp_galvatron.launch.processes import Launch, LaunchError, World, launch
from paddlenlp_galvatron.launch.store import StoreServer
from paddlenlp_galvatron.launch.watch import Leader

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from paddlenlp_galvatron.launch import status
from paddlenlp_galvatron.launch.status import RankOutcome
how, rank = sys.argv[1], int(os.environ["PADDLE_TRAINER_ID"])
if how == "silent":
    time.sleep(60)
if rank == 1 and how == "does not import":
    raise ImportError("no such module")
folder = Path(__file__).parent
(folder / f"begun.{rank}").touch()
while len(list(folder.glob("begun.*"))) < 3:  # on a busy machine one may begin seconds before another
    time.sleep(0.05)
status.begin()
status.enter(3)
if how == "busy":
    time.sleep(60)
if rank == 1:
    logs = [Path(__file__).with_name("log") / f"workerlog.{other}" for other in (0, 2)]
    while not all(log.exists() and "waits" in log.read_text() for log in logs):
        time.sleep(0.05)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "left":
        os._exit(0)
    if how == "refused":
        status.failed(RankOutcome.REFUSED, "field: the reason", 2)
        sys.exit(2)
    if how == "failed":
        status.failed(RankOutcome.FAILED, "ValueError: the reason")
        time.sleep(0.3)  # ends after those that fail for want of it
        sys.exit(1)
    if how in ("stalled", "hangs"):
        time.sleep(60)
try:
    with status.waiting("all_reduce of ranks 0, 1, 2"):
        print("waits", flush=True)
        if how in ("killed", "left", "failed", "refused"):
            time.sleep(0.6)
        if how == "stalled":
            time.sleep(2.5)
        elif how in ("stopped", "hangs"):
            time.sleep(60)
        raise OSError
except OSError:
    status.failed(RankOutcome.LOST_A_PEER, "gloo/transport/tcp: the noise")
    sys.exit(1)
"""
CASES = {
    "killed": ("rank 1 was ended by signal 9 (SIGKILL) in step 4; its log: ", 1),
    "stopped": ("rank 1 was stopped by a signal (process ", 1),
    "left": ("rank 1 ended with exit code 0 before its work was done in step 4; its log: ", 1),
    "refused": ("field: the reason (rank 1)", 2),
    "failed": ("rank 1 failed in step 4: ValueError: the reason; its log: ", 1),
    "does not import": ("rank 1 ended with exit code 1: ImportError: no such module; its log: ", 1),
    "stalled": ("rank 1 did not come to the others, who wait for it: it has computed for ", 1),
}


WAITED = "; ranks 0, 2 waited in all_reduce of ranks 0, 1, 2 in step 4"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "failing_rank.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setattr("paddlenlp_galvatron.launch.processes.GRACE_S", 0.5)
    monkeypatch.setattr(faults, "STOPPED_S", 1.0)
    monkeypatch.setattr(faults, "IDLE_S", 1.0)
    monkeypatch.setattr(faults, "SEARCH_S", 1.0)


@pytest.mark.parametrize("how", CASES)
def test_the_rank_to_blame_is_named_first(tmp_path, how):
    message, exit_code = CASES[how]
    with pytest.raises(LaunchError) as caught:
        launch("failing_rank", [how], 3, tmp_path / "log", timeout_s=300)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(message)
    assert "noise" not in str(caught.value)
    assert WAITED in first or how in ("refused", "does not import")
    assert caught.value.exit_code == exit_code
    assert "its log: " not in first or Path(first.split("its log: ")[1].split(";")[0]).is_file()
    if how == "stalled":
        assert "failing_rank.py" in first and "line" in first  # where it is
    if how == "stopped":
        reported = re.search(r"did not continue for (\d+) s", first)
        assert reported and int(reported[1]) < 30  # before those that wait give up by themselves, after 60
    assert not running(tmp_path)


LOST = """
import sys, time
from pathlib import Path
from paddlenlp_galvatron.launch import status
from paddlenlp_galvatron.launch.status import CONNECTING, FIRST_USE, RankOutcome
how, tries = sys.argv[1], Path(__file__).with_name("tries")
status.begin()
with tries.open("a") as file:
    file.write("one\\n")
if how == "in a step":
    status.enter(0)
if how.startswith("hangs") and (how == "hangs twice" or len(tries.read_text().split()) == 1):
    with status.waiting(FIRST_USE + " ranks 0, 1"):
        time.sleep(100)
if how == "twice" or not how.startswith("hangs") and len(tries.read_text().split()) == 1 or how == "in a step":
    where = CONNECTING[1] + " ranks 0, 1" if how == "a group" else CONNECTING[0]
    status.failed(RankOutcome.LOST_A_PEER, "RuntimeError: [gloo/transport/tcp/pair.cc:784] TIMEOUT", 1, where)
    sys.exit(1)
status.done()
"""


@pytest.mark.parametrize(
    ("how", "tries", "ended"),
    [
        *(("once", 2, False), ("a group", 2, False), ("twice", 2, True), ("in a step", 1, True)),
        *(("hangs once", 2, False), ("hangs twice", 2, True)),
    ],
)
def test_ranks_that_lose_one_another_while_they_connect_are_started_once_more(
    tmp_path, capfd, monkeypatch, how, tries, ended
):
    """As where a port scanner connects to a port of gloo before a rank does, or its connection stops gloo's thread."""
    monkeypatch.setattr(faults, "FIRST_USE_S", 2.0)
    (tmp_path / "worker.py").write_text(LOST)
    stranger = "another program, such as a port scanner, may have connected"
    try:
        launch(str(tmp_path / "worker.py"), [how], 1, tmp_path / "log", 60)
        error = ""
    except LaunchError as fault:
        error = str(fault)
    assert (tmp_path / "tries").read_text().split() == ["one"] * tries
    assert bool(error) == ended and (stranger in error) == how.endswith("twice")
    assert ("the ranks are started once more" in capfd.readouterr().err) == (tries == 2)


def test_late_ranks_are_named(tmp_path):
    with pytest.raises(LaunchError, match=r"^rank 0, 1 did not end within 1 s"):
        launch("failing_rank", ["silent"], 2, tmp_path / "log", timeout_s=1)
    assert not running(tmp_path)


def test_of_ranks_that_all_compute_none_is_blamed_when_the_time_is_up(tmp_path):
    with pytest.raises(LaunchError, match=r"^rank 0, 1, 2 did not end within 4 s; logs: "):
        launch("failing_rank", ["busy"], 3, tmp_path / "log", timeout_s=4)


def test_of_late_ranks_only_the_stopped_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "STOPPED_S", 100.0)
    reported = pytest.raises(LaunchError, match=r"^rank 1 was stopped by a signal")
    with reported, Launch("failing_rank", ["stopped"], World(3), tmp_path / "log", timeout_s=1) as running:
        deadline = time.monotonic() + 300
        while faults._state(running._ranks.ranks[1].process.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in running.wait():
            pass


def test_who_is_waited_for_is_named_where_no_collective_ends_by_itself(tmp_path, monkeypatch):
    """As on GPUs, there after half an hour."""
    monkeypatch.setattr("paddlenlp_galvatron.launch.processes.WAIT_S", 1.5)
    with pytest.raises(LaunchError, match=r"^rank 1 did not come to the others, .*failing_rank.py"):
        launch("failing_rank", ["hangs"], 3, tmp_path / "log", timeout_s=300)
    assert not running(tmp_path)


def test_a_rank_that_no_kill_ends_is_left():
    """It waits for a disk that hangs."""
    stuck = Mock(**{"poll.return_value": None, "wait.side_effect": subprocess.TimeoutExpired("rank", 0)})
    processes._end([faults.Rank(0, stuck, status.RankStatusMemory(), Path())])
    assert stuck.terminate.called and stuck.kill.called


def test_a_node_that_does_not_join_is_named(monkeypatch):
    monkeypatch.setattr(watch, "MEETING_S", 0.2)
    monkeypatch.setattr(watch, "LATE_S", 0.1)
    server = StoreServer("127.0.0.1", 0, "")
    try:
        head = Leader(Nodes(2, 0, "node-0", server.port), server)
        deadline = time.monotonic() + 30
        while not (fault := head.verdict([], [], [])):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        server.close()
    assert fault.message == "node 1 did not join within 0 s"


def test_of_several_causes_the_first_is_named():
    judge = FaultClassifier()
    later, sooner = (Fault(FaultKind.CAUSE, rank, f"rank {rank}", age) for rank, age in ((0, 1.0), (1, 2.0)))
    lost = Fault(FaultKind.CONSEQUENCE, 2, "rank 2", 9.0)
    assert judge.verdict([lost, later], []) is None  # others may still report
    time.sleep(faults.SETTLE_S)
    assert judge.verdict([lost, later, sooner], []) == sooner


def test_who_computes_is_to_blame_where_others_wait_also_on_another_node():
    late, stall = Fault(FaultKind.LATE, 0, "ranks 0, 1"), Fault(FaultKind.STALL, 1, "rank 1")
    judges = {late: (FaultClassifier(), []), stall: (FaultClassifier(), [Wait(2, "all_reduce", 3.0)])}
    assert not any(judge.verdict([late], [stall], waits) for judge, waits in judges.values())
    time.sleep(faults.SEARCH_S)
    for blamed, (judge, waits) in judges.items():
        fault = judge.verdict([late], [stall], waits)
        assert fault and fault.message.startswith(blamed.message)


def test_too_many_processes_are_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"^nproc: 20000 processes on a node .*; start at most \d+"):
        launch("failing_rank", ["silent"], 20_000, tmp_path / "log", timeout_s=300)
    assert not (tmp_path / "log").exists()


EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit\n"


@pytest.mark.parametrize("how", ["module", "script", "store"])
def test_no_code_is_taken_from_the_current_folder(tmp_path, monkeypatch, how):
    """It may be a model's, or data of others."""
    (here := tmp_path / "download").mkdir()
    (here / "secrets.py").write_text(EVIL)
    (here / "asyncio.py").write_text(EVIL)
    (tmp_path / "imports.py").write_text("import asyncio, secrets\nprint(secrets.token_hex(4))\n")
    monkeypatch.chdir(here)
    if how == "store":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            place = f"127.0.0.1:{probe.getsockname()[1]}"
        store._start_server(place, "token")
        store._kept.pop().communicate("")
    else:
        launch("imports" if how == "module" else str(tmp_path / "imports.py"), [], 1, tmp_path / "log", timeout_s=60)
    assert not (here / "ran").exists()


def test_the_log_of_a_rank_follows_no_link_and_waits_for_no_pipe(tmp_path):
    (tmp_path / "ends.py").write_text("print('of the rank')\n")
    (tmp_path / "victim").write_text("kept")
    (log := tmp_path / "log").mkdir()
    (log / "workerlog.0").symlink_to(tmp_path / "victim")
    os.mkfifo(log / "workerlog.1")
    launch("ends", [], 2, log, timeout_s=60)
    assert (tmp_path / "victim").read_text() == "kept"
    assert all((log / f"workerlog.{rank}").read_text() == "of the rank\n" for rank in (0, 1))


def test_only_the_end_of_a_log_is_read_and_once(tmp_path, monkeypatch):
    (path := tmp_path / "log").write_bytes(b"x" * 3 * faults.LOG_END_BYTES + b"\nthe end")
    reads = []
    monkeypatch.setattr(faults, "read_end", lambda log, read=faults.read_end: reads.append(log) or read(log))
    rank = faults.Rank(0, Mock(**{"poll.return_value": 1}), status.RankStatusMemory(), path)
    stated = {rank.log_end() for _ in range(9)}
    assert [len(text) for text in stated] == [faults.LOG_END_BYTES] and stated.pop().endswith("the end")
    assert len(reads) == 1


def test_who_looks_busy_when_another_has_failed_is_not_to_blame():
    judge = FaultClassifier()
    lost, after = Fault(FaultKind.CONSEQUENCE, 1, "rank 1", 1.0), Fault(FaultKind.STALL, 0, "rank 0", 9.0)
    assert judge.verdict([lost], []) is None
    time.sleep(faults.SEARCH_S)
    assert judge.verdict([lost], [after], [Wait(1, "all_reduce", 3.0)]) == lost


def test_scratch_folders_go_with_their_command_or_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("x-") as used:
        killed = start_scratch(tmp_path)
        [other] = set(tmp_path.glob("x-*")) - {used}
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        with scratch_folder("x-"):
            assert used.exists() and not other.exists()
        with pytest.raises(ValueError), scratch_folder("x-") as failed:
            raise ValueError
    reported = start_scratch(tmp_path)
    reported.terminate()
    assert reported.wait(10) == 128 + signal.SIGTERM
    assert set(tmp_path.glob("x-*")) == {failed}  # for the user to look into


def start_scratch(folder: Path) -> subprocess.Popen[bytes]:
    """A command that holds a scratch folder."""
    script = f"""
import tempfile, time
tempfile.tempdir = {str(folder)!r}
from paddlenlp_galvatron.base.writing import scratch_folder
from paddlenlp_galvatron.cli.main import exit_code_of
def work():
    with scratch_folder("x-"):
        print("ready", flush=True)
        time.sleep(60)
exit_code_of(work)
"""
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert command.stdout and command.stdout.readline() == b"ready\n"
    return command


def running(folder: Path) -> list[str]:
    """Processes of this interpreter that still run the module of the folder."""
    wanted = f"PYTHONPATH={folder}:".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if wanted in environment and b"failing_rank" in command and sys.executable.encode() in command:
            found.append(process.name)
    return found
