"""A page shows the output of its commands; `make pages` writes it."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(ROOT / "tools" / "blocks.py"))
LONG = {"finetune", "fit"}  # they train, or search large models; as all tutorials do


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.stem in LONG or page.stem.startswith("tutorial_") else [])
        for page in BLOCKS["pages"]()
    ],
    ids=lambda page: page.stem,
)
def test_a_page_shows_what_its_commands_print(page):
    assert BLOCKS["renew"](page, check=True) == []
