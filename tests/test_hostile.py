"""Whatever files and command lines hold: exit codes 0, 2 and 3, a line a fault, nothing left behind, in bounded time
and memory. `python -m hostile.run` tries as many as one likes; these are a few of each generator."""

import pytest
from hostile import options
from hostile.run import case_of, troubles_of, warm_up

CASES = 300
SEED = 1
# What no number, name or path of an option should be.
WRONG = ["inf", "nan", "-1", "0", "1e30", "1" + "0" * 400, "", "\x1b]0;x\x07\x1b[2J"]


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


def test_hostile_files_and_command_lines():
    found = {
        number: (case_of(SEED, number).words, troubles)
        for number in range(CASES)
        if (troubles := troubles_of(case_of(SEED, number)))
    }
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("command", options.BASES, ids=" ".join)
def test_every_option_of_every_command_bears_every_wrong_value(command):
    found = {
        (name, value): troubles
        for name in options.options_of(command)
        if name not in options.FREE
        for value in WRONG
        if (troubles := troubles_of(options.with_option(command, name, value)))
    }
    assert not found


def test_every_command_is_tried():
    """A command that is new stands in the table of those that are tried."""
    from paddlenlp_galvatron.cli.main import COMMANDS

    assert {command[0] for command in options.BASES} == set(COMMANDS)
