"""docs/*/search.md says what is: every key of the JSON, examples that run."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections import defaultdict
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from paddlenlp_galvatron.base.limits import MOST_RANKS, MOST_SAMPLES
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.options.group import canonical_options
from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.planner import branches
from paddlenlp_galvatron.planner.options import MOST_BATCHES, MOST_PLANS

from .test_search import FIELDS, OPTIONS, folder, words  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / language / "search.md" for language in ("en", "zh")]
pages = pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])


@pages
def test_every_key_of_the_answer_is_named(page, folder, galvatron):  # noqa: F811
    text = page.read_text()
    for gb in (8, 0.1):
        ran = galvatron(*words(**OPTIONS | {"memory_constraint": gb}), "--json")
        assert not [key for key in json.loads(ran.out.splitlines()[-1]) if f"`{key}`" not in text and key != "feasible"]


@pages
def test_the_limits_are_those_of_the_code(page):
    (told,) = re.findall(r"^(?:Limits: |上限：)(.*\n.*)$", page.read_text(), re.MULTILINE)
    known = [
        MOST_RANKS,
        MOST_SAMPLES,
        MOST_BATCHES,
        branches.MOST_FAMILIES,
        branches.MOST_STRATEGIES,
        branches.MOST_PRICES,
    ]
    known += [MOST_PLANS]
    assert {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", told)} == set(known)


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


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the commands of the page print, that which explains their plan, and the first ones on a smaller device."""
    with chdir(tmp_path_factory.mktemp("example")), redirect_stdout(StringIO()) as out, redirect_stderr(out):
        commands = blocks(PAGES[0])[0].replace("\\\n", " ").splitlines()
        for line in commands:
            assert main(shlex.split(line)[1:]) == 0
        assert main(["explain", *map(str, Path("configs").iterdir())]) == 0
        assert main([*shlex.split(commands[-1])[1:], "--memory_constraint=12"]) == 3
    return out.getvalue()


def blocks(page):
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", page.read_text(), re.MULTILINE)]


def numbers_apart(text):
    """The words of a text, and its numbers but for how long a search took."""
    text = re.sub(r"searched in [\d.]+ s", "searched", text).replace(",", "")
    return re.sub(r"[\d.]+", "N", " ".join(text.split())), [float(number) for number in re.findall(r"\d+\.?\d*", text)]


@pages
@pytest.mark.parametrize(("name", "shown"), [("search.md", [1, 3]), ("explain.md", [2, 3])])
def test_what_the_examples_print_is_what_the_commands_print(page, name, shown, said):
    """Word for word; numbers follow the prices, and may be 5 % off before the page is to be renewed."""
    lines = defaultdict(list)
    for line in said.splitlines():
        words, numbers = numbers_apart(line)
        lines[words].append(pytest.approx(numbers, rel=0.05, abs=0.15))
    found = blocks(page.with_name(name))
    for block in (found[number] for number in shown):
        for line in re.sub(r"\n(?=   \d|\(layers)", " ", block).splitlines():
            words, numbers = numbers_apart(line)
            assert numbers in lines[words], line


@pages
def test_the_options_of_the_examples_exist(page):
    text = page.read_text()
    config = re.search(r"((?:^    .*\n)+)", text.split("search.yaml")[1].split("\n", 1)[1], re.MULTILINE)
    assert config
    sections = yaml.safe_load(config[1])
    values = {
        k: v for key, value in sections.items() for k, v in (value if isinstance(value, dict) else {key: value}).items()
    }
    assert canonical_options(values, FIELDS)["memory_constraint"] == 36
    flags = {flag for block in re.findall(r"(?:^    galvatron search.*\n(?:^    .*\n)*)", text, re.MULTILINE)
             for flag in re.findall(r"--(\w+)", block)}  # fmt: skip
    assert flags and canonical_options(dict.fromkeys(flags, 1), FIELDS)
