"""On CPU each rank of a host has processors of its own."""

import os

import pytest

pytest.importorskip("paddle")

from forked_ranks import fork

from paddlenlp_galvatron.runtime import device

RANK = """
import os
from paddlenlp_galvatron.runtime.device import pin_rank
pin_rank()
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of so many processors, two threads of a core each half of them apart."""

    def of(count):
        for number in range(count):
            low = number % (count // 2)
            (tmp_path / str(number)).write_text(f"{low},{low + count // 2}")
        monkeypatch.setattr(device, "host_processors", lambda: tuple(range(count)))
        monkeypatch.setattr(device, "TOPOLOGY", str(tmp_path / "{}"))

    return of


def test_ranks_share_no_core_where_there_is_one_for_each(host):
    host(8)
    assert device.processor_shares(2) == [[0, 1], [2, 3]]
    assert device.processor_shares(4) == [[0], [1], [2], [3]]
    assert device.processor_shares(8) == [[number] for number in range(8)]
    assert device.processor_shares(9) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_rank_stays_on_its_processors(tmp_path):
    environment = {**os.environ, "PADDLE_RANK_IN_NODE": "1", "PADDLE_LOCAL_SIZE": "2"}
    program, stated = tmp_path / "rank.py", tmp_path / "printed"
    program.write_text(RANK)
    assert fork([str(program)], environment, stated).wait(300) == 0
    assert stated.read_text().splitlines()[-1] == str(device.processor_shares(2)[1])
