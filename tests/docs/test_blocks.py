"""A page shows the output of its commands; `make pages` writes it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(ROOT / "tools" / "blocks.py"))
PAGE = """
```sh
galvatron plan uniform llama2-7b --world_size 8 --global_train_batch_size 8 --seq_length 64 --output plan.json
galvatron plan show plan.json
```

```text
ranks     8 in 1 stage of 8
…
0      0-31       -         1       8   ddp           no         -
```
"""


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


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """An English page and its Chinese one."""
    both = tmp_path / "page.md", tmp_path / "page_zh.md"
    monkeypatch.setitem(BLOCKS["renew"].__globals__, "translation", lambda _: both[1])
    for path in both:
        path.write_text(PAGE)
    return both


@pytest.mark.parametrize(
    ("was", "now"),
    [("0-31", "0-30"), ("no         -", "yes        -"), ("…\n", ""), ("8 in 1 stage", "9 in 1 stage")],
    ids=["a number", "a word", "a line that is left out", "another number"],
)
def test_a_block_that_is_stale_is_found_and_written(pages, was, now):
    page, other = pages
    assert BLOCKS["renew"](page, check=True) == []
    for path in pages:
        path.write_text(PAGE.replace(was, now, 1))
    [fault] = BLOCKS["renew"](page, check=True)
    assert fault.startswith(f"{page}:") and "make pages" in fault
    if was[0].isalpha():  # other words are not known to be the same line
        assert BLOCKS["renew"](page, check=False)
    else:
        assert BLOCKS["renew"](page, check=False) == [] and page.read_text() == other.read_text() == PAGE


def test_a_translation_has_the_same_blocks(pages):
    page, other = pages
    other.write_text(PAGE.replace("0-31", "0-30"))
    [fault] = BLOCKS["renew"](page, check=True)
    assert fault.startswith(f"{other}: its blocks are not those")


def test_a_command_that_fails_or_does_not_exist_is_refused(pages):
    page, _ = pages
    page.write_text("```sh\ngalvatron plan show none.json\n```\n")
    with pytest.raises(ValueError, match="exit code 2"):
        BLOCKS["renew"](page, check=True)
    page.write_text("```sh\nls\n```\n")
    with pytest.raises(ValueError, match="only galvatron is run"):
        BLOCKS["renew"](page, check=True)
