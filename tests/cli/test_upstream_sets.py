"""The argument sets of Galvatron's scripts (1.x, 2.0, 2.4) and of its PaddleNLP port's go through as they stand.

Options that need GPUs (flash attention, `device gpu`) are refused by name on a machine without, and they alone.
"""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Plan, Precision, write_plan
from paddlenlp_galvatron.training.paddlenlp.arguments import read_words
from paddlenlp_galvatron.training.prepare import prepare

SETS = tomllib.loads((Path(__file__).parents[1] / "fixtures" / "upstream_arguments.toml").read_text())
PORT = ("port_train", "port_model", "port_config", "port_parallel", "port_fused", "port_data", "port_runtime")


def split(*sets: str) -> list[str]:
    """The words of sets by their names, and of other text."""
    return [word for text in sets for word in SETS.get(text, text).split()]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_of(*words: str) -> tuple[Plan, ModelShape]:
    """The plan and the model that options of training ask for on 8 ranks."""
    return prepare(read_words(words), 8).settings.load_plan()


def test_galvatrons_training(place, galvatron):
    sets = split("galvatron_model", "galvatron_train", "galvatron_parallel", "galvatron_data")
    ran = galvatron("train", "--dry_run", "--nproc", "8", *sets)
    assert ran.code == 0, ran.err
    assert "note: hidden_size" in ran.out
    assert "--adam_weight_decay (--weight_decay holds)" in ran.err and "--dropout_prob (Llama" in ran.err
    plan, shape = run_of(*sets)
    assert (len(plan.stages), plan.layers[0].tp, plan.vocab.dp_type.value) == (2, 2, "zero2")
    assert shape.initializer_range == 0.01
    ran = galvatron("train", "--dry_run", "--nproc", "8", *sets, "--use-flash-attn")
    assert ran.code == 0 and "shown as on GPUs, of which this machine has none" in ran.out


@pytest.mark.parametrize("tied_to_a_plan", [False, True])
def test_the_ports_training(place, galvatron, tied_to_a_plan):
    assumed = Assumptions(True, Precision.BF16)
    write_plan(uniform_plan(layers=16, world_size=8, global_train_batch_size=8, assumed=assumed), place / "own.json")
    named = ["--fine_grained_config_path", "own.json"] if tied_to_a_plan else []
    ran = galvatron("train", "--dry_run", "--nproc", "8", *split(*PORT, "port_granularity"), *named)
    assert ran.code == 0, ran.err
    if tied_to_a_plan:
        assert "ignored: the plan own.json decides" in ran.out
        return
    plan, _ = run_of(*split(*PORT, "port_granularity"))
    assert (plan.layers[0].tp, plan.vocab.tp, plan.layers[0].dp_type.value) == (4, 4, "zero2")
    assert (plan.micro_batches, plan.global_batch) == (32, 2 * 32 * 2)


def test_profiles(place, galvatron):
    for what in ("computation", "memory"):
        more = split("--profile_mode static --profile_batch_size 8 --profile_seq_length_list 2048 --profile_type", what)
        ran = galvatron("profile", what, "--analytic", "a100", "--model_size", "llama-7b", *split("profile"), *more)
        assert ran.code == 0, ran.err
        assert "hidden_size, num_attention_heads, vocab_size ignored, as set_*_manually is 0" in ran.err
        more = split("--profile_mode static --profile_fixed_batch_size 8 --profile_fixed_seq_length_list 1024", what)
        ran = galvatron("profile", what, "--analytic", "a100", *split(*PORT), "--profile_type", what, *more[:-1])
        assert ran.code == 0, ran.err
        assert "--learning_rate" in ran.err and "(it is of training)" in ran.err
    assert galvatron("profile", "hardware", "--analytic", "a100", *split("hardware")).code == 0


def test_searches(place, galvatron):
    assert galvatron("profile", "all", "--analytic", "a100", "--model", "llama-7b", "--seq_length", "2048").code == 0
    for sets in (
        split("galvatron_model", "search"),
        split("galvatron_model", "search", "search_24"),
        ["--model_size", "llama-7b", *split("port_search")],
        split("port_search", "--num_attention_heads 32 --vocab_size 32000 --intermediate_size 11008 --layernum_min 1"),
    ):
        ran = galvatron("search", *sets)
        assert ran.code == 0, ran.err
    ran = galvatron("search", *split("galvatron_model", "search"), "--profile_gpu_num", "64")
    assert ran.code == 2 and "profile_gpu_num: 64, but 8 are searched for" in ran.err


def test_all_mistakes_are_reported_at_once_with_the_nearest_name(galvatron):
    words = ["--globl_tp_deg", "2", "--vocab_cp", "2", "--xyz", "--dropout_prob", "0.1", "--do_train", "0"]
    ran = galvatron("train", *words)
    assert ran.code == 2
    lines = ran.err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["--globl_tp_deg", "--vocab_cp", "--xyz", "--do_train"]
    assert "did you mean --global_tp_deg?" in lines[0] and "--help lists all" in lines[2]
    assert "it trains; to evaluate alone" in lines[3]
