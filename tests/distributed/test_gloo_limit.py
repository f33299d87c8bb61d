"""A wait in a gloo group ends when the launch says, not after gloo's 30 s: a slow rank is not a lost one."""

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.launch.processes import LaunchError, launch

RANKS = """
import sys, time
import paddle
import paddle.distributed as dist
from paddlenlp_galvatron.launch import status
from paddlenlp_galvatron.runtime.collectives import all_reduce, receive_start, send_start
from paddlenlp_galvatron.runtime.cpu_backend import set_gloo_limit
from paddlenlp_galvatron.runtime.groups import DOWN, Groups, run_as_rank, start_world
limit_s, late_s = map(float, sys.argv[1:])
def main():
    rank, _ = start_world()
    groups = Groups(rank)
    groups.create({((0, 1), ""), ((0, 1), DOWN)})
    status.enter(3)
    both, down = groups.get((0, 1)), groups.get((0, 1), DOWN)
    if limit_s:
        set_gloo_limit(both.process_group, limit_s)
    all_reduce(paddle.ones([4]), both)
    if rank == 0:
        time.sleep(late_s)
    all_reduce(paddle.ones([4]), both)
    if rank == 0:
        time.sleep(late_s)
        send_start(paddle.ones([4]), 1, down).wait()
    else:
        receive_start(paddle.zeros([4]), 0, down).wait()
run_as_rank(main)
"""


@pytest.fixture
def ranks(tmp_path) -> str:
    (tmp_path / "ranks.py").write_text(RANKS)
    return str(tmp_path / "ranks.py")


def test_the_limit_is_gloos(ranks, tmp_path):
    """The shortest way to see that it is set: it ends a wait far sooner than gloo would by itself."""
    with pytest.raises(LaunchError, match=r"^rank [01] "):
        launch(ranks, ["1", "20"], 2, tmp_path / "log", timeout_s=600)
    assert "TIMEOUT" in Path(tmp_path, "log", "workerlog.1").read_text()


def test_who_computes_for_longer_than_ranks_wait_is_named(ranks, tmp_path):
    with pytest.raises(LaunchError, match=r"^rank 0 did not come .*; rank 1 waited in all_reduce of"):
        launch(ranks, ["0", "60"], 2, tmp_path / "log", timeout_s=600, wait_s=7)


@pytest.mark.slow
def test_a_rank_that_is_slower_than_gloos_own_limit_is_not_lost(ranks, tmp_path):
    launch(ranks, ["0", "40"], 2, tmp_path / "log", timeout_s=600)
