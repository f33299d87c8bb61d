"""Every option of every `--help` stands in a test: one of another file, or one of these that show what it changes."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperOption
from typer.main import get_command

pytest.importorskip("paddle")

from paddlenlp_galvatron.cli.main import COMMANDS
from paddlenlp_galvatron.plan.aliases import ALIASES
from paddlenlp_galvatron.plan.options import canonical_options
from paddlenlp_galvatron.profiler.options import PointOptions, ProfileMode
from paddlenlp_galvatron.runtime.weights import SeededWeights
from paddlenlp_galvatron.search import SearchOptions
from paddlenlp_galvatron.training.one_process import train_one_process
from paddlenlp_galvatron.training.prepare import GROUPS, prepare
from paddlenlp_galvatron.training.recipe import Recipe

TESTS = Path(__file__).parents[1]
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
# What changes only what is seen on devices or over hours, and why no quick test can show it.
CANNOT = {
    "overlap_time_multiply": "how long work beside messages lasts; the coefficient is the same but for noise",
    "effort": "the search of small models ends long before",
}


def commands() -> dict[str, Any]:
    """Every command that has options, by its words."""
    found = {}
    for name in COMMANDS:
        command = get_command(import_module(f"paddlenlp_galvatron.cli.{name}").app)
        below = getattr(command, "commands", None) or {"": command}
        found.update({f"{name} {word}".strip(): one for word, one in below.items()})
    return found


def options() -> set[str]:
    return {
        option.opts[0].lstrip("-")
        for command in commands().values()
        for option in command.params
        if isinstance(option, TyperOption) and option.name != "help"
    }


def words_of_tests() -> set[str]:
    """The words of all test functions and of the cases above them, in small letters with underscores."""
    words: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        if file.stem.endswith("_docs"):
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.Assign):
                for part in [node, *getattr(node, "decorator_list", [])]:
                    segment = ast.get_source_segment(text, part) or ""
                    words |= {word.replace("-", "_").lower() for word in re.findall(r"[\w-]+", segment)}
                    words |= {word.lstrip("_") for word in words if word.startswith("__")}
    return words


def test_every_option_stands_in_a_test_or_says_why_not():
    known, words = options(), words_of_tests()
    names = {option: {option, *(other for other, ours in ALIASES.items() if ours == option)} for option in known}
    assert sorted(option for option in known if not names[option] & words) == []
    assert set(CANNOT) <= known


def test_no_help_shows_what_is_not_meant_for_people(galvatron):
    for words in commands():
        shown = galvatron(*words.split(), "--help").out
        assert "Undefined" not in shown and "[[" not in shown and words.split()[-1] in shown


def losses(tmp_path: Path, **recipe: Any) -> list[float]:
    from paddlenlp_galvatron.plan import load_model

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    shape = load_model(tmp_path)
    batches = ([[(3 * i + j) % 32 for j in range(9)] for i in range(2)] for _ in range(4))
    import numpy as np

    source = SeededWeights(1, 0.5)
    made = Recipe(**{"learning_rate": 0.1, "weight_decay": 0.1} | recipe).over(4)
    return [loss for loss, _ in train_one_process(shape, 8, source, made, (np.array(batch) for batch in batches))]


def test_every_number_of_the_recipe_changes_what_is_learnt(tmp_path):
    usual = losses(tmp_path)
    for change in (
        {"adam_beta1": 0.1},
        {"adam_beta2": 0.1},
        {"adam_epsilon": 0.1},
        {"weight_decay": 0.5},
        {"warmup_steps": 3},
        {"decay_steps": 2},
        {"min_learning_rate": 0.09},
    ):
        assert losses(tmp_path, **change)[-1] != usual[-1], change
    descent = {"optim": "sgd", "learning_rate": 1.0}
    assert losses(tmp_path, **descent, max_grad_norm=1e-3)[-1] != losses(tmp_path, **descent)[-1]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"do_eval": "1"}, lambda run: run.evaluates == "steps"),
        ({"continue_training": "1"}, lambda run: str(run.load) == "."),
        ({"initializer_range": "0.5"}, lambda run: run.load_plan()[1].initializer_range == 0.5),
        ({"overwrite_output_dir": "1"}, lambda run: run.continue_from == "none"),
        ({"overwrite_output_dir": "0"}, lambda run: run.continue_from == "auto"),
        ({"save_total_limit": "7"}, lambda run: run.save_total_limit == 7),
        ({"logging_dir": "there"}, lambda run: run.logging_dir == Path("there")),
        ({"logging_first_step": "1"}, lambda run: run.logging_first_step),
        ({"amp_master_grad": "1"}, lambda run: run.amp_master_grad),
    ],
)
def test_an_option_of_training_reaches_the_run(tmp_path, monkeypatch, given, shown):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    known = [name for group in GROUPS for name in group.model_fields]
    values = {"model": ".", "seq_length": "8", "global_batch_size": "4", "pp_deg": "1", **given}
    assert shown(prepare(canonical_options(values, known), 2).settings)


def test_fp32_gradients_take_room(tmp_path, monkeypatch, galvatron):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--dry_run", "--nproc", "8", "--model", "llama2-7b", "--sdp", "1", "--seq_length", "64"]
    words += ["--global_batch_size", "8", "--bf16", "1"]
    usual, more = (galvatron(*words, "--amp_master_grad", word).out for word in "01")
    assert " 12856.1 " in usual and " 14463.1 " in more  # MiB: an eighth of 16 and of 18 bytes a weight


def test_a_step_between_sizes_leaves_some_out_and_every_one_left_is_measured_for_galvatron():
    batch = PointOptions(profile_mode=ProfileMode.BATCH, profile_batch_size_step=3)
    assert batch.batch_sizes == [1, 4, 7]
    assert PointOptions(profile_mode=ProfileMode.SEQUENCE, profile_seq_length_step=1024).lengths(1) == [512, 1536]
    assert not batch.every_size and PointOptions(profile_for="galvatron").every_size
    assert PointOptions(adaptive=False).every_size


def test_what_the_search_prices_changes_with_its_options():
    assert SearchOptions(no_global_memory_buffer=True).cost_options != SearchOptions().cost_options
    assert SearchOptions(overlap_coe_path=Path("x")).profile_arguments["overlap_coe_path"] == Path("x")
