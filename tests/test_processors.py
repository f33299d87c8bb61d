"""On CPU each rank of a host has processors of its own, which stay awake as long as it lives."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from forked_ranks import fork

from paddlenlp_galvatron.runtime import processors

RANK = """
import os, time
from pathlib import Path
from paddlenlp_galvatron.runtime.processors import settle
settle()
print(sorted(os.sched_getaffinity(0)), Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
time.sleep(600)
"""
IS_ROOT = os.geteuid() == 0
TOLD = re.compile(r"^(\[.*\]) ([\d ]+)$", re.M)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of so many processors, two threads of a core each half of them apart."""

    def of(count):
        for number in range(count):
            low = number % (count // 2)
            (tmp_path / str(number)).write_text(f"{low},{low + count // 2}")
        monkeypatch.setattr(processors, "of_host", lambda: tuple(range(count)))
        monkeypatch.setattr(processors, "TOPOLOGY", str(tmp_path / "{}"))

    return of


def test_ranks_share_no_core_where_there_is_one_for_each(host):
    host(8)
    assert processors.shares(2) == [[0, 1], [2, 3]]
    assert processors.shares(4) == [[0], [1], [2], [3]]
    assert processors.shares(8) == [[number] for number in range(8)]
    assert processors.shares(9) == []


@pytest.mark.parametrize(("ranks", "priority"), [(4, 19), (9, 0), (1, 0)])
def test_threads_give_way_to_a_rank_that_has_processors_of_its_own(host, monkeypatch, ranks, priority):
    host(8)
    monkeypatch.setenv("PADDLE_RANK_IN_NODE", "0")
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", str(ranks))
    ended = threading.Event()
    with processors.threads_behind():
        reader = threading.Thread(target=ended.wait)
        reader.start()
    mine, of_the_reader = (os.getpriority(os.PRIO_PROCESS, thread) for thread in (0, reader.native_id))
    late = IS_ROOT and int(Path(f"/proc/{reader.native_id}/timerslack_ns").read_text())
    ended.set()
    reader.join()
    assert (mine, of_the_reader) == (0, priority)
    assert not IS_ROOT or late == processors.LATE_NS


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_rank_keeps_its_processor_awake_until_it_is_killed(tmp_path):
    own = processors.shares(2)[1]
    environment = {**os.environ, "PADDLE_RANK_IN_NODE": "1", "PADDLE_LOCAL_SIZE": "2"}
    program, said = tmp_path / "rank.py", tmp_path / "said"
    program.write_text(RANK)
    rank = fork([str(program)], environment, said)
    try:
        _until(lambda: TOLD.search(said.read_text()))
        affinity, children = TOLD.search(said.read_text()).groups()
        spinners = [int(word) for word in children.split()]
        assert affinity == str(own) and len(spinners) == len(own)
        _until(lambda: all(os.sched_getscheduler(each) == os.SCHED_IDLE for each in spinners))
        assert [os.sched_getaffinity(each) for each in spinners] == [{processor} for processor in own]
    finally:
        rank.kill()
    _until(lambda: not any(Path(f"/proc/{each}/cmdline").exists() for each in spinners))


def _until(holds, seconds=300):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()
