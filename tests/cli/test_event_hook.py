"""`--on_event`: the user's command gets each event, and does no harm to a run."""

import json
from io import StringIO

import pytest

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.cli import training_run
from paddlenlp_galvatron.cli.training_run import EventHook

EVENT = {"event": "saved", "step": 3, "text": "saved [bold] 'a b' $(exit 9)"}


def run(command: str | None, folder, events: int = 1) -> str:
    stated = StringIO()
    hook = EventHook(command, folder / "on_event.log", Console(file=stated, soft_wrap=True))
    for _ in range(events):
        hook.start(EVENT)
    hook.close()
    return stated.getvalue()


def test_the_command_gets_the_event_as_json(tmp_path):
    assert run(f"cat >> {tmp_path}/got", tmp_path, events=2) == ""
    assert [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()] == [EVENT, EVENT]
    assert run(None, tmp_path) == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param("echo sorry; exit 3", "exit code 3", id="fails"),
        pytest.param("no-such-command", "exit code 127", id="does not exist"),
        pytest.param("kill -9 $$", "exit code -9", id="is killed"),
        pytest.param("if", "exit code 2", id="is no shell command"),
        pytest.param("sleep 600 & sleep 600", "was ended, as it took more than", id="hangs, with a child"),
        pytest.param("trap '' TERM; while :; do :; done", "was ended, as it took more than", id="ignores signals"),
    ],
)
def test_a_command_that_fails_or_hangs_is_a_warning(command, words, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "HOOK_S", 0.5)
    stated = run(command, tmp_path)
    assert stated.startswith("warning: on_event: for the event saved: ") and words in stated
    assert stated.count("\n") == 1


def test_output_of_the_command_is_kept_and_a_missing_folder_is_a_warning(tmp_path):
    run("echo sorry", tmp_path)
    assert (tmp_path / "on_event.log").read_text() == "sorry\n"
    assert "cannot be started" in run("true", tmp_path / "missing")
