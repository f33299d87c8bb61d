"""For any files and command lines: exit codes 0, 2 and 3, a line a fault, nothing left behind, in bounded time
and memory. `make test-full` tries every option of every command."""

import sys
from pathlib import Path

import pytest

from hostile import options, run
from hostile.case import Case
from hostile.known import known
from hostile.run import troubles_of, warm_up

# Values that no number, name or path of an option should have.
WRONG = ["inf", "nan", "-1", "0", "1e30", "1" + "0" * 400, "", "\x1b]0;x\x07\x1b[2J"]


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


BAD = {
    "takes more than": lambda words: sum(1 for _ in iter(int, 1)),  # no end
    "kills its process": lambda words: len(bytearray(2 * run.MEMORY_MIB * run.MIB)),
    "prints": lambda words: sys.stdout.write("\x1b[2J") and 0,
    "leaves": lambda words: Path("left").touch() or 0,
    "ends with 1": lambda words: 1,
    "0 lines of error": lambda words: 2,
}


def test_a_command_that_behaves_badly_is_found(monkeypatch):
    monkeypatch.setattr(run, "CPU_S", 1)
    for message, command in BAD.items():
        monkeypatch.setattr(run, "galvatron", command)
        found = troubles_of([Case((), {})] * (1 if message == "takes more than" else 2))
        assert message in str(found[0]), message


def test_what_was_once_taken_or_broke_a_command_is_refused():
    found = known()
    troubles = troubles_of(list(found.values()))
    assert not {list(found)[number]: reported for number, reported in troubles.items()}


@pytest.mark.slow
@pytest.mark.parametrize("command", options.BASES, ids=" ".join)
def test_every_option_of_every_command_bears_every_wrong_value(command):
    names = [name for name in options.options_of(command) if name not in options.FREE]
    cases = [options.with_option(command, name, value) for name in names for value in WRONG]
    assert not {cases[number].words: troubles for number, troubles in troubles_of(cases).items()}


def test_every_command_is_tried():
    """A command that is new stands in the table of those that are tried."""
    from paddlenlp_galvatron.cli.main import COMMANDS

    assert {command[0] for command in options.BASES} == set(COMMANDS) - options.PROGRAMS
