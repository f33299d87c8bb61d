"""The command-line options are frozen: options.json has those of every command."""

import json
from pathlib import Path

from paddlenlp_galvatron.cli.main import commands

FROZEN = Path(__file__).with_name("options.json")


def test_no_option_comes_unasked():
    frozen = json.loads(FROZEN.read_text())
    present = {name: sorted(command.fields) for name, command in commands().items()}
    added = [f"{name} --{one}" for name in present for one in present[name] if one not in frozen.get(name, ())]
    removed = [f"{name} --{one}" for name in frozen for one in frozen[name] if one not in present.get(name, ())]
    assert not added, (
        f"options are frozen, and {added} are new: add them to {FROZEN.name}, and name in the commit message the "
        "option that goes instead, or the issue that asks for them"
    )
    assert not removed, f"{removed} are gone: remove them from {FROZEN.name}, and name them in CHANGELOG.md"
