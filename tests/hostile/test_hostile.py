"""For any files and command lines: exit codes 0, 2 and 3, a line a fault, nothing left behind, in bounded time
and memory. `make test-full` tries every option of every command."""

import pytest

from hostile import options
from hostile.known import known
from hostile.run import troubles_of, warm_up

# Values that no number, name or path of an option should have.
WRONG = ["inf", "nan", "-1", "0", "1e30", "1" + "0" * 400, "", "\x1b]0;x\x07\x1b[2J"]


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


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
