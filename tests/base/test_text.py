"""How texts are shown."""

from pathlib import Path

from paddlenlp_galvatron.base.text import near


def test_a_path_is_called_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "runs/plan.json") == Path("runs/plan.json") == near(Path("runs/plan.json"))
    assert near(tmp_path.parent / "plan.json") == tmp_path.parent / "plan.json"
