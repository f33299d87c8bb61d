"""PaddleNLP's stock files of fine-tuning: each argument is applied, noted or refused by name, all at once."""

import json
from pathlib import Path

import pytest
from paddlenlp.trainer.trainer_utils import get_scheduler

from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.options.foreign import HOLDS, IDLE
from paddlenlp_galvatron.options.tuning import TuningOptions
from paddlenlp_galvatron.plan import UserError
from paddlenlp_galvatron.training.arguments import OPTIONS, read_words
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.prepare import prepare

# Names and values of llm/config/llama/sft_argument.json of PaddleNLP's repository at commit 98187ec.
STOCK = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 8,
    "eval_accumulation_steps": 16,
    "num_train_epochs": 3,
    "learning_rate": 3e-05,
    "warmup_steps": 30,
    "logging_steps": 1,
    "evaluation_strategy": "epoch",
    "save_strategy": "epoch",
    "src_length": 1024,
    "max_length": 2048,
    "bf16": True,
    "fp16_opt_level": "O2",
    "do_train": True,
    "do_eval": True,
    "disable_tqdm": True,
    "load_best_model_at_end": True,
    "eval_with_do_generation": False,
    "metric_for_best_model": "accuracy",
    "recompute": False,
    "save_total_limit": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "pipeline_parallel_config": "disable_p2p_cache_shape",
    "sharding": "stage2",
    "zero_padding": False,
    "unified_checkpoint": True,
    "use_flash_attention": False,
}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    train_tokenizer(["a b"], 257).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def read(folder: Path, notes: list[str], **changed):
    content = {"model_name_or_path": str(folder), "dataset_name_or_path": str(folder), **STOCK, **changed}
    content = {name: value for name, value in content.items() if value is not None}
    file = folder / "sft_argument.json"
    file.write_text(json.dumps(content | {"output_dir": str(folder / "out")}))
    return read_words([str(file)], notes.append, "sft")


def test_the_stock_file_is_read_and_nothing_of_it_is_ignored_silently(folder):
    notes: list[str] = []
    values = read(folder, notes)
    settings = prepare(values, 2, folder).settings
    assert settings.tuning.task == "sft" and settings.tuning.rows == "none"
    assert settings.load == folder and settings.evaluates == "epoch"
    assert settings.load_plan()[0].assumed.seq_length == 2048
    assert settings.recipe.min_learning_rate is None
    names = {"max_length": "seq_length", "model_name_or_path": "model_size"}
    for name in STOCK:
        applied = names.get(name, name) in values or name in OPTIONS
        assert applied or f"--{name}" in notes[0] or name in HOLDS, name


def test_what_cannot_be_had_is_refused_by_name_all_at_once(folder):
    wrong = {"prefix_tuning": True, "neftune": True, "weight_quantize_algo": "nf4", "eval_with_do_generation": True}
    with pytest.raises(UserError) as refused:
        read(folder, [], **wrong)
    assert [fault.split(":")[0].lstrip("-") for fault in refused.value.faults] == [
        *(name for name in STOCK if name in wrong),
        *(name for name in wrong if name not in STOCK),
    ]


def test_the_stock_file_of_lora_asks_for_adapters(folder):
    """What llm/config/llama/lora_argument.json has beside."""
    values = read(
        folder, notes := [], lora=True, use_quick_lora=False, pissa=False, sharding="stage1", learning_rate=3e-4
    )
    tuning = prepare(values, 2, folder).settings.tuning
    assert tuning.kind == "lora" and tuning.adapters("") == Adapters(8, 16.0)
    assert "--use_quick_lora" in notes[0]
    values = read(folder, [], lora=True, lora_rank=4, rslora=True)
    assert TuningOptions.from_values(values).adapters("").scaling == 2
    with pytest.raises(UserError, match="lora_rank: of LoRA's adapters, but the task is sft"):
        TuningOptions.from_values(read(folder, [], lora_rank=4))


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, "none"),
        ({"zero_padding": True}, "in_order"),
        ({"zero_padding": True, "greedy_zero_padding": True}, "greedy"),
        ({"intokens": True, "zero_padding": None}, "in_order"),
        ({"packing": "best_fit"}, "best_fit"),
    ],
)
def test_padding_is_packing(given, rows, folder):
    assert TuningOptions.from_values(read(folder, [], **given)).rows == rows


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"task": "sft"}, "dataset_name_or_path: missing"),
        ({"task": "dpo", "dataset_name_or_path": "x"}, "dpo can be planned, but not trained yet"),
        ({"dataset_name_or_path": "x"}, "dataset_name_or_path: of fine-tuning, but the task is pretrain"),
        ({"task": "sft", "dataset_name_or_path": "x", "packing": "greedy", "zero_padding": True}, "contradicts"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(given, fault):
    with pytest.raises(UserError, match=fault):
        TuningOptions.from_values(given)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_rates_of_fine_tuning_are_those_of_paddlenlps_trainer(kind, folder):
    recipe = prepare(read(folder, [], lr_scheduler_type=kind), 2, folder).settings.recipe.over(100)
    stock = get_scheduler(kind, 3e-5, 30, 100)
    for step in (0, 1, 29, 30, 31, 70, 99):
        stock.last_epoch = step
        assert recipe.rate_at(step) == pytest.approx(stock.get_lr(), abs=1e-12)
    assert recipe.rate_at(99) < 1e-6


def test_every_argument_has_one_fate():
    assert not HOLDS.keys() & IDLE.keys() and not (HOLDS.keys() | IDLE.keys()) & OPTIONS.keys()
