"""For any files and command lines: exit codes 0, 2 and 3, a line a fault, nothing left behind, in bounded time
and memory. `python -m hostile.run` tries as many as one likes; these are a few of each generator."""

import sys
from pathlib import Path

import pytest

from hostile import options, run
from hostile.case import Case
from hostile.known import known
from hostile.run import case_of, troubles_of, warm_up

SEED = 1
# Values that no number, name or path of an option should have.
WRONG = ["inf", "nan", "-1", "0", "1e30", "1" + "0" * 400, "", "\x1b]0;x\x07\x1b[2J"]


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


def _loops(words):
    while True:
        pass


def _fills_the_memory(words):
    return len(bytearray(2 * run.MEMORY_MIB * run.MIB))


def _prints(words):
    sys.stdout.write("\x1b[2J")
    return 0


def _leaves_a_file(words):
    Path("left").touch()
    return 0


BAD = {
    "takes more than": _loops,
    "kills its process": _fills_the_memory,
    "prints": _prints,
    "leaves": _leaves_a_file,
    "ends with 1": lambda words: 1,
    "0 lines of error": lambda words: 2,
}


def test_a_command_that_behaves_badly_is_found(monkeypatch):
    monkeypatch.setattr(run, "CPU_S", 1)
    for message, command in BAD.items():
        monkeypatch.setattr(run, "galvatron", command)
        found = troubles_of([Case((), {})] * (1 if command is _loops else 2))
        assert message in str(found[0]), message


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_files_and_command_lines(count):
    cases = [case_of(SEED, number) for number in range(count)]
    assert not {cases[number].words: troubles for number, troubles in troubles_of(cases).items()}


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
