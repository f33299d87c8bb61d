"""An output_dir that nodes do not share is found when a run starts. Ranks are threads with folders of their own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training import run

RANKS = 3


@pytest.fixture
def gathering(monkeypatch):
    """Lets threads gather as ranks do."""
    meeting, given = threading.Barrier(RANKS), {}

    def gather(engine, mine):
        given[engine.rank] = mine
        meeting.wait(60)
        everybody = [given[rank] for rank in range(RANKS)]
        meeting.wait(60)
        return everybody

    monkeypatch.setattr(run, "gather_objects", gather)
    monkeypatch.setattr(run, "from_first", lambda engine, mine: gather(engine, mine)[0])
    monkeypatch.setattr(run, "VISIBLE_S", 0.5)


def faults(folders):
    def check(rank):
        try:
            run.require_shared(folders[rank], SimpleNamespace(rank=rank))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return set(pool.map(check, range(RANKS)))


def test_a_rank_that_sees_another_folder_is_named_on_all(gathering, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    found = faults([tmp_path, tmp_path, other])
    assert all("rank 2 does not see what rank 0 writes;" in fault for fault in found)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_that_all_see_is_taken(gathering, tmp_path):
    assert faults([tmp_path] * RANKS) == {""}
    assert not list(tmp_path.iterdir())
