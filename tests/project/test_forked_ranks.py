"""A forked rank equals one that the launcher would have started: its own words, environment, folder, log and end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from core_pool import CorePool
from forked_ranks import Forked, begin_forked, begun_with, fork, imported_modules

RANK = """
import json, os, signal, sys
import paddle, numpy
assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "the time limit of a test is not the rank's"
assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
left = getattr(paddle, "left", None)
paddle.left = sys.argv[1]  # for the next user of this process: nobody
drawn = [paddle.rand([1]).item(), numpy.random.rand()]
print(json.dumps([sys.argv[1:], __name__, os.getcwd(), os.environ["OWN"], "TERM_" in os.environ, left, drawn]))
if sys.argv[1] == "exits":
    sys.exit(7)
if sys.argv[1] == "says":
    sys.exit("the reason")
if sys.argv[1] == "raises":
    raise ValueError("the reason")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


def begin(folder: Path, how: str) -> Forked:
    words = ["-m", "rank_of_test", how] if how == "module" else [str(folder / "rank_of_test.py"), how]
    return fork(words, {"PYTHONPATH": str(folder), "OWN": how, "PATH": os.environ["PATH"]}, folder / f"{how}.log")


def test_each_is_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM_", "of the tests, not of the rank")
    (tmp_path / "rank_of_test.py").write_text(RANK)
    codes = {"ends": 0, "module": 0, "exits": 7, "says": 1, "raises": 1, "killed": -signal.SIGKILL}
    ranks = {how: begin(tmp_path, how) for how in codes}
    assert {how: rank.wait(300) for how, rank in ranks.items()} == codes
    draws = set()
    for how in codes:
        stated, *more = (tmp_path / f"{how}.log").read_text().splitlines()
        *found, drawn = json.loads(stated)
        assert found == [[how], "__main__", str(tmp_path), how, False, None]
        draws.add(tuple(drawn))
        assert ("the reason" in " ".join(more)) == (how in ("says", "raises"))
    assert len({first for first, _ in draws}) == len({second for _, second in draws}) == len(codes)


def test_a_rank_that_would_differ_from_a_started_one_is_not_forked(tmp_path):
    with pytest.raises(ValueError, match=r"\['LD_PRELOAD'\] cannot be forked: mark the test"):
        begin_forked([sys.executable, "x.py"], begun_with() | {"LD_PRELOAD": "of this rank"}, tmp_path / "log", 0)


IMPORTS = """
import os, socket, sys, threading, time
from importlib import import_module
read = []
for name in [name for name in sys.modules if name.startswith("paddlenlp_galvatron")]:
    del sys.modules[name]

def watch(holder, name):
    original = getattr(holder, name)
    def watched(*arguments, **named):
        file = sys._getframe(1).f_code.co_filename
        file = sys._getframe(2).f_code.co_filename if file == os.__file__ else file
        if "/paddlenlp_galvatron" in file:
            read.append(f"{file}: {name} {arguments[1:]}")
        return original(*arguments, **named)
    setattr(holder, name, watched)

for name in ("__getitem__", "__iter__", "get", "pop"):
    watch(type(os.environ), name)
for name in ("time", "monotonic", "perf_counter", "strftime"):
    watch(time, name)
for holder, name in ((os, "getpid"), (os, "getenv"), (socket, "gethostname"), (threading.Thread, "start")):
    watch(holder, name)
for name in sys.argv[1:]:
    import_module(name)
os.environ.get("X") if len(sys.argv) == 1 else None
print(*read, sep="\\n")
sys.exit(len(read))
"""


def test_importing_the_project_reads_neither_environment_nor_clock(tmp_path):
    """So ranks may be forked from a process that has imported it."""
    program, log = tmp_path / "imports.py", tmp_path / "log"
    program.write_text(IMPORTS)
    assert fork([str(program), *imported_modules()], begun_with(), log).wait(300) == 0, log.read_text()
    program = tmp_path / "paddlenlp_galvatron.py"  # a name of the project's, and no module
    program.write_text(IMPORTS)
    assert fork([str(program)], begun_with(), log).wait(300) == 1, log.read_text()


def test_programs_of_ranks_run_as_main_alone():
    assert "paddlenlp_galvatron.runtime.engine" in imported_modules()
    assert "paddlenlp_galvatron.training.train_worker" not in imported_modules()


def test_a_launch_takes_a_core_for_each_rank(tmp_path):
    mine, others = CorePool(tmp_path, 4), CorePool(tmp_path, 4)

    def free() -> int:
        """Tokens that another worker could take now."""
        count = 0
        for token in range(4):
            try:
                with others._locked(f"token.{token}", fcntl.LOCK_EX | fcntl.LOCK_NB):
                    count += 1
            except BlockingIOError:
                pass
        return count

    with mine.ranks(3):
        assert free() == 1
        with mine.ranks(4):  # within a launch of this process
            assert free() == 1
    with mine.ranks(8):
        assert free() == 0
    assert free() == 4
