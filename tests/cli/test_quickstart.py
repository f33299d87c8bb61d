"""The commands of `scripts/quickstart.sh`; measurements are derived, and training is shown."""

import os
import re
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import read_plan

ROOT = Path(__file__).parents[2]
DERIVED = ["--analytic", "a100", "--seq", "128", "--mixed_precision", "fp32", "--profile_mode", "batch"]
DERIVED += ["--num_gpus_per_node", "4", "--output", "runs/quickstart/profiles"]


def with_less_work(words: list[str]) -> list[str]:
    """Little text, and profiles by arithmetic, of a device whose reserve would be more than this model takes; no
    training."""
    match words[:2]:
        case ["data", _]:
            return [{"4": "1"}.get(word, word) for word in words]
        case ["profile", "model"]:
            return ["profile", "all", words[2], *DERIVED]
        case ["search", _]:
            return [*words, "--context_mib", "0"]
        case ["train", _]:
            return [*words, "--dry_run"]
        case ["report", _]:
            return [word for word in words if "log" not in word]
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a checkout in which the commands of the quick start were run, in this process."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("scripts/quickstart.sh", "examples/tiny-qwen2/config.json"):
        (folder / part).parent.mkdir(parents=True)
        shutil.copy(ROOT / part, folder / part)
    (folder / "galvatron").write_text(f'#!/bin/sh\necho "$@" >>{folder}/commands\n')
    (folder / "galvatron").chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["sh", "scripts/quickstart.sh"], cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [f"[{part}/6]" in ran.stdout for part in range(1, 7)] == [True] * 6
    commands = [line.split() for line in (folder / "commands").read_text().splitlines()]
    names = [" ".join(words[: 1 + (words[0] in ("data", "profile"))]) for words in commands]
    assert names == ["data prepare", "profile hardware", "profile model", "search", "train", "parity", "report"]
    with chdir(folder):
        for words in commands:
            if words[:2] != ["profile", "hardware"]:
                assert main(with_less_work(words)) == 0, words
    return folder


def test_it_makes_what_its_page_names(folder):
    plan = read_plan(folder / "runs/quickstart/plan.json")
    assert len(plan.layers) == 8 and plan.world_size == 4
    assert all((folder / "runs/quickstart" / name).exists() for name in ("data/python.idx", "profiles", "report.html"))


def test_its_plan_is_taken_by_every_command_of_the_page(folder, galvatron, monkeypatch):
    monkeypatch.chdir(folder)
    for language in ("en", "zh"):
        text = (ROOT / "docs" / language / "quickstart.md").read_text()
        commands = set(re.findall(r"galvatron ((?:plan show|explain|report) runs/[^`\n]+)", text))
        assert len(commands) == 3
        for command in commands:
            ran = galvatron(*command.partition(" --log")[0].split())
            assert ran.code == 0, ran.err
