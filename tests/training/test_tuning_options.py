"""PaddleNLP's stock files of fine-tuning: each argument is applied, noted or refused by name, all at once."""

import json
import re
from pathlib import Path

import pytest
from paddlenlp.trainer.trainer_utils import get_scheduler
from small_model import GROUPED_MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.options.aliases import canonical_name
from paddlenlp_galvatron.options.foreign import FOREIGN
from paddlenlp_galvatron.options.tuning import PreferenceOptions, TuningOptions
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.paddlenlp.arguments import read_words
from paddlenlp_galvatron.training.prepare import prepare

# Names and values of files of PaddleNLP's repository, each at the commit that stands next to it.
FILES = json.loads((Path(__file__).parents[1] / "fixtures" / "paddlenlp_finetuning.json").read_text())["files"]
STOCK = FILES["llama/sft_argument.json"]["arguments"]
REFUSED = {
    "llama/flashmask/lora.json": ["benchmark"],
    "llama/dislora_argument.json": ["dislora", "target_modules"],
    "llama/longlora_argument.json": ["use_shift_sparse_attention"],
    "llama/lqlora_argument.json": ["weight_quantize_algo"],
    "llama/irqlora_argument.json": ["weight_quantize_algo", "ir_qlora"],
    "llama/pose_yarn.json": ["use_long_sequence_strategies", "rope_scaling_factor", "use_pose_convert"],
    "llama/reft_argument.json": ["reft"],
    "llama/vera_argument.json": ["vera"],
    "deepseek-v3/sft_argument.json": ["using_fake_gate", "autotuner_benchmark"],
}
MODEL = GROUPED_MODEL | {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 8, "vocab_size": 300}
MODEL |= {"max_position_embeddings": 131072}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    train_tokenizer(["a b"], 257).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def read(folder: Path, notes: list[str], stock=STOCK, task="sft", **changed):
    paths = dict.fromkeys(("model_name_or_path", "dataset_name_or_path"), str(folder))
    content = stock | {name: path for name, path in paths.items() if name in stock} | changed
    content = {name: value for name, value in content.items() if value is not None}
    file = folder / "argument.json"
    file.write_text(json.dumps(content | {"output_dir": str(folder / "out")}))
    return read_words([str(file)], notes.append, task)


@pytest.mark.parametrize("name", REFUSED)
def test_a_stock_file_that_asks_for_another_method_is_refused_by_all_that_do(name, folder):
    with pytest.raises(UserError) as refused:
        read(folder, [], FILES[name]["arguments"])
    named = [fault.partition(" not supported: ")[0] for fault in refused.value.faults]
    options = [option for words in named for option in re.split(r", (?=[-\w]+: )", words)]
    assert sorted(option.partition(":")[0].lstrip("-") for option in options) == sorted(REFUSED[name])
    assert all(" not supported: " in fault for fault in refused.value.faults)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("deepseek")])
def test_a_stock_file_is_read_and_nothing_of_it_is_ignored_silently(name, folder):
    notes: list[str] = []
    stock, task = FILES[name]["arguments"], "dpo" if "train_dataset_path" in FILES[name]["arguments"] else "sft"
    values = read(folder, notes, stock, task, **dict.fromkeys(REFUSED.get(name, ())))
    prepared = prepare(values, 8, folder)
    settings = prepared.settings
    notes[0] += " ".join(prepared.notes)
    length = stock.get("max_length") or stock["max_seq_len"]
    assert settings.load == folder and settings.load_plan()[0].assumed.seq_length == length
    assert settings.evaluates == stock["evaluation_strategy"] and settings.min_learning_rate is None
    assert settings.kind == ("dpo" if task == "dpo" else "lora" if stock.get("lora") else "sft")
    assert settings.adapts == bool(stock.get("lora"))
    assert settings.best_metric in (None, stock.get("metric_for_best_model", "loss"))
    if settings.best_metric is None and "metric_for_best_model" in stock:
        assert "metric_for_best_model (the best checkpoint needs" in notes[0]
    greedy = "greedy" if stock.get("greedy_zero_padding") else "in_order"
    assert settings.effective_packing == (greedy if task == "dpo" or stock["zero_padding"] else "none")
    if task == "dpo":
        assert settings.preference.loss == stock.get("loss_type", "sigmoid")
        assert settings.preference.beta == stock.get("beta", stock.get("dpo_beta", 0.1))
    if stock.get("rslora_plus"):
        assert settings.adapters("") == Adapters(64, 4.0, rslora=True) and settings.lora_rate_scale == 4
    for given in stock.keys() - set(REFUSED.get(name, ())):
        applied = canonical_name(given) in values
        assert applied or f"--{given}" in notes[0] or given in FOREIGN, given


def test_what_cannot_be_had_is_refused_by_name_all_at_once(folder):
    wrong = {"prefix_tuning": True, "neftune": True, "weight_quantize_algo": "nf4", "eval_with_do_generation": True}
    with pytest.raises(UserError) as refused:
        read(folder, [], **wrong)
    assert [fault.split(":")[0].lstrip("-") for fault in refused.value.faults] == [
        *(name for name in STOCK if name in wrong),
        *(name for name in wrong if name not in STOCK),
    ]


def test_the_stock_file_of_lora_asks_for_adapters(folder):
    """Further arguments of llm/config/llama/lora_argument.json."""
    values = read(
        folder, notes := [], lora=True, use_quick_lora=False, pissa=False, sharding="stage1", learning_rate=3e-4
    )
    tuning = prepare(values, 2, folder).settings
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
    assert TuningOptions.from_values(read(folder, [], **given)).effective_packing == rows


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"task": "sft"}, "dataset_name_or_path: missing"),
        (
            {"task": "sft", "dataset_name_or_path": "x", "max_prompt_len": 9},
            "max_prompt_len: of DPO, but the task is sft",
        ),
        ({"task": "dpo", "dataset_name_or_path": "x", "train_dataset_path": "y"}, "dataset_name_or_path is given, too"),
        ({"task": "dpo", "train_dataset_path": "x", "lora_rank": 4}, "the task is dpo; give --lora 1"),
        ({"dataset_name_or_path": "x"}, "dataset_name_or_path: of fine-tuning, but the task is pretrain"),
        ({"task": "sft", "dataset_name_or_path": "x", "packing": "greedy", "zero_padding": True}, "contradicts"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(given, fault):
    with pytest.raises(UserError, match=fault):
        TuningOptions.from_values(given)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_rates_of_fine_tuning_are_those_of_paddlenlps_trainer(kind, folder):
    recipe = prepare(read(folder, [], lr_scheduler_type=kind), 2, folder).settings.over(100)
    stock = get_scheduler(kind, 3e-5, 30, 100)
    for step in (0, 1, 29, 30, 31, 70, 99):
        stock.last_epoch = step
        assert recipe.rate_at(step) == pytest.approx(stock.get_lr(), abs=1e-12)
    assert recipe.rate_at(99) < 1e-6


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"loss_type": "kto_pair"}, "loss_type: kto_pair is not supported: its mean"),
        ({"pref_loss_ratio": 0}, "nothing would be learnt"),
    ],
)
def test_a_loss_of_pairs_that_cannot_be_had_is_refused(given, fault):
    with pytest.raises(UserError, match=fault):
        PreferenceOptions.from_values(given)


def test_orpo_is_or_with_the_chosen_answers_loss_and_without_a_reference():
    reported = PreferenceOptions.from_values({"loss_type": "orpo"}).pair_loss
    assert (reported.loss, reported.sft_ratio, reported.has_reference) == ("or", 1, False)
