"""docs/*/search.md says what is: every key of the JSON, examples that run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from paddlenlp_galvatron.plan import read_plan

from .test_search import FIELDS, OPTIONS, folder, words  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / language / "search.md" for language in ("en", "zh")]
pages = pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])


@pages
def test_the_program_runs(page, folder):  # noqa: F811
    """With the example's model and cluster in the place of those that it names."""
    program = re.search(
        r"^    import paddlenlp_galvatron as galvatron\n(?:    .*\n|\n)+", page.read_text(), re.MULTILINE
    )
    assert program
    text = textwrap.dedent(program[0])
    mine = {"llama2-7b": "example.json", "seq=2048": "seq=512, world_size=8, num_nodes=2"}
    for theirs, ours in mine.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    exec(text, {})
    assert read_plan(folder / "plan.json").global_batch == 16
