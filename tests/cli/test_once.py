"""A command settles each question once, and imports the modules for that alone."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from paddlenlp_galvatron.cli.main import main

PACKAGE = "paddlenlp_galvatron"
MODEL = "model.json"
CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 128}
SEARCH = ("search", "qwen2.5-0.5b", "--device", "h100-80gb", "--gpus", "8", "-o", "found.json")
TRAIN = ("train", "plan.json", "--model", MODEL, "--input_dir", "random", "--max_steps", "1")
# Runs a command up to the start of its ranks, if it has any, and prints how many modules of the package it has loaded.
PROGRAM = f"""
import sys
from paddlenlp_galvatron.cli.main import main

def loaded(*_):
    print(sum(name.partition(".")[0] == "{PACKAGE}" for name in sys.modules), file=sys.stderr)
    sys.exit()

if sys.argv[1] == "train":
    from paddlenlp_galvatron.cli.training_run import TrainingRun
    TrainingRun.start = loaded
if (code := main(sys.argv[1:])):
    sys.exit(code)
loaded()
"""


@pytest.fixture
def plan(tmp_path, galvatron):
    Path(MODEL).write_text(json.dumps(CONFIG))
    sizes = ("--world_size", "2", "--global_train_batch_size", "4", "--seq_length", "64", "--mixed_precision", "fp32")
    assert galvatron("plan", "uniform", MODEL, *sizes).code == 0


@pytest.mark.parametrize(("words", "most"), [(("plan", "show", "plan.json"), 52), (SEARCH, 97), (TRAIN, 102)])
def test_a_command_imports_few_modules(plan, words, most):
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stderr.split()[-1]) <= most


def test_a_rehearsed_run_reads_its_plan_once(plan):
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        assert main([*TRAIN, "--dry_run"]) == 0
    finally:
        sys.setprofile(None)
    assert calls["read_plan"] == 1
    assert calls["load_model"] <= 2 and calls["require_valid"] <= 2
