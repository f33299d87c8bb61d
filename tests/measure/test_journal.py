import json

import pytest

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.measure.journal import FOLDER, Journal

IDENTITY = {"device": "a", "layers": (1, 3)}


def opened(folder, identity=IDENTITY, fresh=False) -> Journal:
    return Journal.open(folder, "model", identity, 0, 1, fresh)


def never() -> None:
    raise AssertionError("measured twice")


def test_what_was_measured_is_known_to_the_next_run(tmp_path):
    first = opened(tmp_path)
    assert first.get("a", lambda: [1.5, None]) == [1.5, None]
    assert first.get("a", never) == [1.5, None]
    del first
    again = opened(tmp_path)
    assert again.get("a", never) == [1.5, None]
    assert "1 numbers" in again.kept_note[0]


def test_another_machine_or_a_fresh_start_knows_nothing(tmp_path):
    opened(tmp_path).get("a", lambda: 1)
    assert opened(tmp_path, {"device": "b"}).get("a", lambda: 2) == 2
    assert opened(tmp_path, fresh=True).get("a", lambda: 3) == 3
    assert opened(tmp_path).get("a", never) == 3


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_that_was_cut_off_is_measured_again(tmp_path, cut):
    journal = opened(tmp_path)
    journal.get("a", lambda: 1)
    journal.get("b", lambda: 22222)
    del journal
    [file] = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-cut])
    again = opened(tmp_path)
    assert again.get("a", never) == 1
    assert again.get("b", lambda: 3) == 3
    lines = file.read_text().splitlines()
    assert [json.loads(line) for line in lines[1:]] == [["a", 1], ["b", 3]]


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 4096, b"\0" * 512 + b'\n["b", 3]\n', b'\n["b", 3]\n', b'{"step": 1}\n', b"[[], 3]\n", b"\xff\xfe\n"],
)
def test_what_follows_damage_is_measured_again(tmp_path, damage):
    opened(tmp_path).get("a", lambda: 1)
    [file] = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes() + damage)
    again = opened(tmp_path)
    assert again.items() == [("a", 1)]
    assert again.get("b", lambda: 2) == 2


def test_two_profiles_do_not_write_one_journal(tmp_path):
    running = opened(tmp_path)
    with pytest.raises(GalvatronError, match="another profile"):
        opened(tmp_path)
    assert running.get("a", lambda: 1) == 1
