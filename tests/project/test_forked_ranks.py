"""A forked rank equals one that the launcher would have started: its own words, environment, folder, log and end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from forked_ranks import Forked, fork, forking

from paddlenlp_galvatron.launch.processes import launch

RANK = """
import json, os, signal, sys
import paddle, numpy
assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "the time limit of a test is not the rank's"
assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
assert not [name for name in sys.modules if name.startswith("paddlenlp_galvatron")], "of the project nothing is shared"
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


def test_what_a_process_reads_as_it_begins_is_not_passed_to_one_that_has_begun(tmp_path):
    def refuse(*_: object) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        forking(refuse)([sys.executable, "x.py"], os.environ | {"LD_PRELOAD": "of this rank"}, tmp_path / "log", 0)


def test_launches_fork(tmp_path):
    (tmp_path / "rank_of_test.py").write_text("import sys\nassert 'paddle' in sys.modules")
    launch(str(tmp_path / "rank_of_test.py"), [], 2, tmp_path / "log", 300)
