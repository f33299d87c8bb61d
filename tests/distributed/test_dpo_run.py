"""`galvatron train --task dpo`: the reference is made once, a run continues under another plan, and its log shows
it."""

import json
import shutil
from contextlib import chdir

import numpy as np
import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.model.preference import METRICS
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.checkpoint.stored import whole_checkpoints
from paddlenlp_galvatron.training.step_log import read_log

from .plans import plan
from .test_finetune import LENGTH, folder  # noqa: F401 - a fixture

BATCH = 4


@pytest.fixture(scope="module")
def pairs(folder):  # noqa: F811
    """Pairs of short answers, two of which fill a row."""
    letters = np.random.default_rng(1).integers(0, 26, (24, 9))
    lines = [
        {"src": "".join(chr(97 + x) for x in row[:2]), "tgt": [], "sort": [number % 2, 1 - number % 2]}
        | {"response": ["".join(chr(65 + x) for x in part) for part in (row[2 : 4 + number % 2], row[5:])]}
        for number, row in enumerate(letters)
    ]
    (folder / "pairs").mkdir()
    for name, part in (("train", lines[:16]), ("dev", lines[16:])):
        (folder / "pairs" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    return folder


def run(root, output, made, *words, steps) -> int:
    write_plan(made, root / f"{output}.json")
    reported = ["--task", "dpo", "--model", "model", "--continue_training", "0", "--max_seq_len", str(LENGTH)]
    reported += ["--train_dataset_path", "pairs/train.jsonl", "--dev_dataset_path", "pairs/dev.jsonl", "--beta", "0.5"]
    reported += ["--optim", "sgd", "--learning_rate", "0.5", "--lr_scheduler_type", "constant", "--max_grad_norm", "9"]
    reported += ["--max_steps", str(steps), "--output_dir", output]
    with chdir(root):
        return main(["train", f"{output}.json", *reported, *words])


def log(root, output) -> list[dict]:
    return [*map(dict, read_log(root / output / "train_log.jsonl"))]


def test_a_run_continues_under_another_plan_with_the_reference_that_it_began_with(pairs):
    one, evaluated = plan(1, "1 1", batch=BATCH), ("--do_eval", "--eval_steps", "2", "--save_steps", "2")
    best = ("--load_best_model_at_end", "--metric_for_best_model", "rewards/margins")
    assert run(pairs, "dpo", one, *evaluated, *best, steps=4) == 0
    through = log(pairs, "dpo")
    assert through[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the policy is its reference
    assert all(abs(through[0]["metrics"][name]) < 1e-6 for name in METRICS[:2])
    assert through[3]["loss"] < through[0]["loss"] and through[3]["metrics"]["rewards/margins"] > 0
    assert through[3]["metrics"].keys() == set(METRICS) == through[3]["eval_metrics"].keys()
    margins = {record["step"]: record["eval_metrics"]["rewards/margins"] for record in through[1::2]}
    assert json.loads((pairs / "dpo" / "best.json").read_text())["step"] == max(margins, key=margins.get)
    split = plan(2, "1c2 2", vocab="1c2", batch=BATCH, megatron_sp=False)
    assert run(pairs, "split", split, *evaluated, steps=2) == 0
    tables = {file: file.read_bytes() for file in (pairs / "split" / "reference").iterdir()}
    assert run(pairs, "split", one, *evaluated, steps=4) == 0
    assert tables == {file: file.read_bytes() for file in (pairs / "split" / "reference").iterdir()}
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in log(pairs, "split")], [r[key] for r in through], atol=1e-5)
    np.testing.assert_allclose(log(pairs, "split")[3]["eval_loss"], through[3]["eval_loss"], atol=1e-5)


def test_adapters_learn_beside_their_base_which_is_the_reference(pairs, capfd):
    one, lora = plan(1, "1 1", batch=BATCH), ("--lora", "1", "--rslora_plus", "1", "--packing", "none")
    assert run(pairs, "adapters", one, *lora, steps=2) == 0
    first, second = log(pairs, "adapters")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and second["loss"] != first["loss"]
    [checkpoint] = whole_checkpoints(pairs / "adapters" / "checkpoints")
    shutil.copytree(checkpoint, pairs / "begun")
    assert run(pairs, "more", one, *lora, "--lora_path", "begun", steps=1) == 0
    [again] = log(pairs, "more")
    assert again["loss"] != pytest.approx(np.log(2), abs=1e-6)  # the reference has no adapters
    assert run(pairs, "adapters", one, *lora, "--seed", "5", steps=3) != 0
    assert "adapters are others (another base)" in capfd.readouterr().err
    free = ("--loss_type", "orpo")
    assert run(pairs, "free", one, *free, steps=1) == 0
    assert not (pairs / "free" / "reference").exists()
