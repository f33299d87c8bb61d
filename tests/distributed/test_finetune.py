"""`galvatron train --task sft`: the same losses under any plan, packed or not, and after a restart."""

import json
from contextlib import chdir

import numpy as np
import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.step_log import read_log

from .plans import having, plan

LENGTH, SAMPLES = 32, 12
MODEL = small_config("qwen2", num_key_value_heads=2, vocab=300, length=LENGTH, initializer_range=0.1)
DEEPSEEK = MODEL | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1}
DEEPSEEK |= {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK |= {"n_group": 2, "topk_group": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without weights, and samples of 8 to 10 tokens, three of which fill a row."""
    root = tmp_path_factory.mktemp("finetune")
    for name, config in (("model", MODEL), ("deepseek", DEEPSEEK)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        train_tokenizer(["a"], 257).save(str(root / name / "tokenizer.json"))
    letters = np.random.default_rng(0).integers(0, 26, (SAMPLES + 4, 10))
    lines = [
        {"src": "".join(chr(97 + x) for x in row[: 3 + number % 3]), "tgt": "".join(chr(65 + x) for x in row[5:])}
        for number, row in enumerate(letters)
    ]
    (root / "data").mkdir()
    for name, part in (("train", lines[:SAMPLES]), ("dev", lines[SAMPLES:])):
        (root / "data" / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in part))
    return root


def losses(folder, output, made, *words, steps=3, model="model"):
    """The losses of each step, and of the dev split behind the last."""
    write_plan(made, folder / f"{output}.json")
    reported = ["--task", "sft", "--model", model, "--dataset_name_or_path", "data", "--continue_training", "0"]
    reported += ["--max_length", str(LENGTH), "--optim", "sgd", "--learning_rate", "0.1", "--max_steps", str(steps)]
    reported += ["--lr_scheduler_type", "constant", "--do_eval", "--eval_steps", str(steps), "--output_dir", output]
    with chdir(folder):
        assert main(["train", f"{output}.json", *reported, *words]) == 0
    records = read_log(folder / output / "train_log.jsonl")
    return [*(record["loss"] for record in records), records[-1]["eval_loss"]], records


def test_losses_are_the_same_packed_or_not_under_two_plans_and_after_a_restart(folder):
    packed = ("--packing", "best_fit")
    alone, records = losses(folder, "alone", plan(1, "1 1", batch=SAMPLES))
    assert records[0]["filled"] < 0.3 and records[0]["target_tokens_per_s"] > 0
    assert alone[2] < alone[0]
    rows = SAMPLES // 3  # a step is the whole data set in either
    split, records = losses(folder, "split", plan(2, "1c2 2r", batch=rows, megatron_sp=False), *packed)
    np.testing.assert_allclose(split, alone, atol=1e-5)
    assert records[0]["filled"] > 0.75
    part = plan(2, "1 1a", (1, 1), batch=rows, micro_batches=2)
    begun, _ = losses(folder, "again", part, *packed, steps=2)
    np.testing.assert_allclose(begun[:2], alone[:2], atol=1e-5)
    ended, _ = losses(folder, "again", plan(1, "1 1", batch=rows), *packed, steps=3)  # continues from step 2
    np.testing.assert_allclose(ended, alone, atol=1e-5)


def test_deepseek_learns_the_same_packed_under_two_plans(folder):
    packed, rows = ("--packing", "best_fit"), SAMPLES // 3
    alone, _ = losses(folder, "deepseek-alone", plan(1, "1 1", batch=SAMPLES), model="deepseek")
    one = having(plan(2, "2 2r", batch=rows), "1 2")
    other = having(plan(2, "1z 1c2", batch=rows), "1 1x2", dense=(0,))
    for name, made in (("tp", one), ("cp", other)):
        found, _ = losses(folder, f"deepseek-{name}", made, *packed, model="deepseek")
        np.testing.assert_allclose(found, alone, atol=1e-5, err_msg=name)
