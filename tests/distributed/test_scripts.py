"""The scripts end to end: text, profiles, a searched layer-wise plan, and training by it that equals one process."""

import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.cli.pretrain import pretrain
from paddlenlp_galvatron.plan import ModelShape, Plan, load_model, read_plan
from paddlenlp_galvatron.runtime.weights import SeededWeights
from paddlenlp_galvatron.training.data.source import TrainingData
from paddlenlp_galvatron.training.recipe import Recipe
from paddlenlp_galvatron.training.step_log import read_log

REPO = Path(__file__).parents[2]
TOLERANCE = 1e-4  # of the loss, after steps of AdamW
STEPS, SEQ_LENGTH, BATCH, SEED = 4, 64, 16, 42
SIZES = {"layers": 4, "hidden": 64, "inner": 128, "heads": 8, "vocab": 512, "length": SEQ_LENGTH}
FAMILIES = {"llama": {}, "qwen2": {"num_key_value_heads": 4}}
BUDGETS = [f"{0.004 * 0.99**step:.6f}" for step in range(150)]  # GB, of which some make the layers differ


def script(folder: Path, path: str, *words: str, **variables: str) -> str:
    """Run a script in the folder as a user does, and give its output."""
    galvatron = folder / "galvatron"
    if not galvatron.exists():
        galvatron.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paddlenlp_galvatron.cli.main "$@"\n')
        galvatron.chmod(0o755)
    environment = {**os.environ, "GALVATRON": str(galvatron), "PYTHON": sys.executable, **variables}
    done = subprocess.run(
        ["sh", str(REPO / path), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """The beginning of Python's standard library, tokenised: the path of the data set."""
    folder = tmp_path_factory.mktemp("text")
    words = ["data", "prepare", "--output", "text", "--standard_library", "--vocab_size", str(SIZES["vocab"])]
    with chdir(folder):
        assert main([*words, "--limit_mib", "1"]) == 0
    return folder / "text"


def search_layer_wise(folder: Path, world_size: int) -> Plan:
    """The plan of the largest memory under which no one strategy is best for all layers; it lies in configs/."""
    plan_path = folder / "configs" / "galvatron_config.json"
    words = ("scripts/search_dist.sh", "--context_mib", "0", "--no_global_memory_buffer", "1")
    variables = {
        "NUM_GPUS_PER_NODE": str(world_size), "MODEL_SIZE": "model.json", "SEQ_LENGTH": str(SEQ_LENGTH),
        "MIN_BSZ": str(BATCH), "MAX_BSZ": str(BATCH), "MAX_PP_SIZE": "2", "MIXED_PRECISION": "fp32",
        "OUTPUT_CONFIG_PATH": str(plan_path),
    }  # fmt: skip
    search = script(folder, *words, GALVATRON="echo", **variables).split()
    for memory in BUDGETS:
        with chdir(folder):
            assert main([*search, "--memory_upper_limit", memory]) == 0
        plan = read_plan(plan_path)
        if len({(layer.tp, layer.ulysses, layer.dp_type) for layer in plan.layers}) > 1:
            break
    else:
        raise AssertionError("under no budget do layers differ")
    plan_path.unlink()
    script(folder, *words, MEMORY=memory, **variables)
    assert read_plan(plan_path).layers == plan.layers
    return plan


def one_process(shape: ModelShape, text: Path) -> list[float]:
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.01, lr_scheduler_type="cosine", warmup_ratio=0.01).over(STEPS)
    data = TrainingData(text, SEQ_LENGTH, BATCH, SEED)
    batches = (data.batch(step) for step in range(STEPS))
    source = SeededWeights(SEED, shape.initializer_range)
    return [loss for loss, _ in train_one_process(shape, SEQ_LENGTH, source, recipe, batches)]


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        ("qwen2", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen2", 8), ("llama", 8))),
    ],
)
def test_a_searched_plan_trains_as_one_process_does(family, world_size, text, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(small_config(family, **SIZES, **FAMILIES[family])))
    words = ["profile", "all", "--analytic", "a100", "--nproc", str(world_size), "--model", "model.json"]
    words += ["--seq_length", str(SEQ_LENGTH), "--mixed_precision", "fp32", "--use_flash_attn", "0"]
    with chdir(tmp_path):
        assert main(words) == 0
    search_layer_wise(tmp_path, world_size)
    program, *words = script(
        tmp_path,
        f"llm/auto_parallel/galvatron/train_{'qwen' if family == 'qwen2' else family}_fine_grained.sh",
        MODEL="model.json",
        DATA=str(text),
        NUM_GPUS_PER_NODE=str(world_size),
        MAX_STEPS=str(STEPS),
        LEARNING_RATE="1e-3",
        PYTHON="echo",  # in this process, so that the ranks are forked; tests over two hosts let the script do it
    ).split()
    with chdir(tmp_path), redirect_stdout(StringIO()) as reported:
        assert pretrain(program, words) == 0
    assert "galvatron_config.json, the newest in configs" in reported.getvalue()
    records = read_log(tmp_path / "output" / "train_log.jsonl")
    losses = [record["loss"] for record in records]
    assert losses == pytest.approx(one_process(load_model(tmp_path / "model.json"), text), abs=TOLERANCE)
    assert losses[-1] < losses[0]
