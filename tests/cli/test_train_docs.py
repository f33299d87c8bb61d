"""docs/*/train.md says what is: every option of training with its other names and default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_galvatron.options.aliases import other_names
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.training.prepare import GROUPS

ROOT = Path(__file__).parents[2]
FIELDS = {name: info for group in GROUPS if group is not ModelOptions for name, info in group.model_fields.items()}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_has_every_option_with_its_names_and_default(language):
    table = (ROOT / "docs" / language / "train.md").read_text().split("\n## ")[-1]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\| (.+) \|$", table, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(FIELDS)
    for name, others, default, meaning in rows:
        assert meaning
        assert re.findall(r"\w+", others) == other_names(name, FIELDS)
        known = FIELDS[name].get_default()
        if isinstance(known, bool | float):
            assert float(default) == float(known), name
        else:
            assert default == ("" if known is None else str(known)), name
