"""Long work shows itself, by a line now and then where there is no terminal; short work does not."""

from paddlenlp_galvatron.base import printing


def worked(capsys) -> list[str]:
    with printing.Bars(in_bytes=True) as bars:
        task = bars.add_task("converting", total=4)
        for _ in range(2):
            bars.advance(task)
        bars.update(task, completed=4, description="checking")
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_short_work_is_silent_without_a_terminal(capsys):
    assert worked(capsys) == []


def test_long_work_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(printing, "LINE_S", 0.0)
    assert [line.rpartition(", ")[0] for line in worked(capsys)] == [
        "converting: 25 % done",
        "converting: 50 % done",
        "checking: 100 % done",
    ]
