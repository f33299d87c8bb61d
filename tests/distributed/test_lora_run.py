"""LoRA from a base to a merged model: a run under two plans, its adapters in others' folders, and what is refused."""

import gc
import json
import math
import shutil
import sys
from contextlib import chdir

import numpy as np
import pytest

pytest.importorskip("paddle")

from huggingface_models import FOLDER, TUNING
from paddlenlp.peft import LoRAConfig, LoRAModel
from safetensors.numpy import load_file

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.cost_model.weights import held_mib
from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.training.checkpoint.adapters import AdapterFolder, stored_factors
from paddlenlp_galvatron.training.checkpoint.huggingface import HuggingFaceWeights, read_shape
from paddlenlp_galvatron.training.checkpoint.loading import open_weights
from paddlenlp_galvatron.training.step_log import read_log

from .plans import plan
from .test_finetune import LENGTH, folder  # noqa: F401 - a fixture

BATCH = 4


def run(root, output, made, *words, steps=2) -> int:
    write_plan(made, root / f"{output}.json")
    reported = ["--task", "lora", "--lora_rank", "3", "--model", "base", "--dataset_name_or_path", "data"]
    reported += ["--packing", "best_fit", "--max_length", str(LENGTH), "--optim", "sgd", "--learning_rate", "0.5"]
    reported += ["--lr_scheduler_type", "constant", "--max_steps", str(steps), "--output_dir", output]
    with chdir(root):
        return main(["train", f"{output}.json", *reported, *words])


def losses(root, output) -> list[float]:
    return [record["loss"] for record in read_log(root / output / "train_log.jsonl")]


@pytest.fixture(scope="module")
def trained(folder):  # noqa: F811
    """A base of random weights, as a Hugging Face directory, and adapters of two steps under a plan of two ranks."""
    one = plan(1, "1 1", batch=BATCH)
    write_plan(one, folder / "start.json")
    reported = ["--task", "sft", "--model", "model", "--dataset_name_or_path", "data", "--continue_training", "0"]
    reported += ["--max_length", str(LENGTH), "--max_steps", "1", "--learning_rate", "1e-9", "--output_dir", "start"]
    with chdir(folder):
        assert main(["train", "start.json", *reported]) == 0
        assert main(["convert", "g2h", "start", "base", "--like", "model"]) == 0
    assert run(folder, "split", plan(2, "2 1z", batch=BATCH, megatron_sp=False)) == 0
    return folder


def test_a_run_continues_under_another_plan_as_one_that_ran_through(trained):
    one = plan(1, "1 1n", batch=BATCH)
    assert run(trained, "through", one, steps=4) == 0
    assert run(trained, "split", one, steps=4) == 0
    np.testing.assert_allclose(losses(trained, "split"), losses(trained, "through"), atol=1e-5)
    stored = sum(file.stat().st_size for file in (trained / "split" / "checkpoints").rglob("*.safetensors"))
    whole = sum(file.stat().st_size for file in (trained / "start" / "checkpoints").rglob("*.safetensors"))
    assert stored < whole  # of two checkpoints without moments, next to one with them


def test_adapters_are_read_by_paddlenlp_and_merge_to_the_model_that_was_trained(trained):
    with chdir(trained):
        assert main(["convert", "g2h", "split", "adapters"]) == 0
        assert main(["convert", "merge", "base", "split", "merged"]) == 0
        assert main(["convert", "merge", "base", "adapters", "merged-too"]) == 0
    shape = read_shape(trained / "base")
    family = load_family(shape.family)
    gc.collect()  # PaddleNLP takes any warning while it reads for an error, also of files that are closed late
    made = LoRAModel.from_pretrained(
        family.whole_model(shape, family.config(shape, LENGTH)),
        str(trained / "adapters"),
        lora_config=LoRAConfig.from_pretrained(str(trained / "adapters")),
    )
    factors = AdapterFolder(trained / "adapters", shape)
    read = {name: value.numpy() for name, value in made.model.named_parameters() if "lora_" in name}
    assert read and all(np.array_equal(value, factors(name, value.shape)) for name, value in read.items())
    peft = load_file(trained / "adapters" / "adapter_model.safetensors")
    name = f"{shape.traits.prefix}.layers.1.self_attn.q_proj"
    first = peft["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    second = peft["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    np.testing.assert_array_equal(first.T, read[f"{name}.lora_A"])
    base, merged = (open_weights(trained / each, shape) for each in ("base", "merged"))
    size = (shape.hidden_size, shape.hidden_size)
    moved = merged(f"{name}.weight", size) - base(f"{name}.weight", size)
    np.testing.assert_allclose(moved, 2 * (second @ first).T, atol=1e-6)
    assert np.abs(moved).max() > 1e-5
    norm = f"{shape.traits.prefix}.norm.weight"
    np.testing.assert_array_equal(merged(norm, size[:1]), base(norm, size[:1]))
    files = [(trained / each / "model.safetensors").read_bytes() for each in ("merged", "merged-too")]
    assert files[0] == files[1]
    assert HuggingFaceWeights(trained / "merged", shape).precision == base.precision


def test_adapters_of_others_are_where_a_run_begins(trained):
    with chdir(trained):
        if not (trained / "adapters").exists():
            assert main(["convert", "g2h", "split", "adapters"]) == 0
    for file in (trained / "adapters").glob("*"):  # PEFT's files alone
        if not file.name.startswith("adapter_"):
            (trained / "peft").mkdir(exist_ok=True)
        else:
            (trained / "peft").mkdir(exist_ok=True)
            shutil.copyfile(file, trained / "peft" / file.name)
    one = plan(1, "1 1", batch=BATCH)
    assert run(trained, "more", one, "--lora_path", "peft", steps=1) == 0
    assert losses(trained, "more")[0] < losses(trained, "split")[0]
    assert run(trained, "unlike", one, "--lora_path", "peft", "--lora_alpha", "5") == 2


def test_the_second_factor_learns_faster_with_lora_plus(trained):
    one, shape = plan(1, "1 1", batch=BATCH), read_shape(trained / "base")
    moved = {}
    for name, scale in (("plain", "1"), ("plus", "4")):
        assert run(trained, name, one, "--lora_plus_scale", scale, steps=1) == 0
        factors = AdapterFolder(trained / name / "checkpoints" / "step-00000001", shape)
        moved[name] = [factors(each.name, each.shape) for each in stored_factors(shape, 3)]
    for first, second in zip(moved["plain"][::2], moved["plus"][::2], strict=True):
        np.testing.assert_array_equal(first, second)  # A: B is 0, so that it has no gradient yet
        assert 0 < np.abs(first).max() <= 1 / math.sqrt(first.shape[0])
    for first, second in zip(moved["plain"][1::2], moved["plus"][1::2], strict=True):
        np.testing.assert_allclose(4 * first, second, rtol=1e-5)


def test_a_dry_run_counts_frozen_weights_and_adapters(trained, monkeypatch):
    shape, one = read_shape(trained / "base"), plan(1, "1 1", batch=BATCH)
    weights, states = held_mib(one, shape, 0, Adapters(3, 6))
    factors = sum(math.prod(one.shape) for one in stored_factors(shape, 3))
    assert weights * 2**20 == 4 * (shape.parameters + factors)
    assert states * 2**20 == 4 * shape.parameters + 16 * factors
    counted = []
    command = sys.modules["paddlenlp_galvatron.cost_model.weights"]
    monkeypatch.setattr(command, "held_mib", lambda *reported: counted.append(reported[-1]) or held_mib(*reported))
    assert run(trained, "dry", one, "--dry_run") == 0 and not (trained / "dry").exists()
    assert {(each.rank, each.alpha) for each in counted} == {(3, 6)}


def test_what_does_not_belong_together_is_refused(trained, capfd):
    one = plan(1, "1 1", batch=BATCH)
    assert run(trained, "split", one, "--lora_alpha", "5", steps=9) != 0
    assert "its adapters are others (alpha: 6.0 -> 5.0)" in capfd.readouterr().err
    assert run(trained, "start", one, steps=9) != 0
    assert "all weights were trained there" in capfd.readouterr().err
    shutil.copytree(trained / "base", trained / "other")
    file = trained / "other" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with chdir(trained):
        assert main(["convert", "merge", "other", "split", "wrong"]) == 2
    assert "were trained on other weights" in capfd.readouterr().err
    with pytest.raises(UserError, match="holds no adapters"):
        AdapterFolder(trained / "data", read_shape(trained / "base"))
    shutil.copytree(TUNING / "qwen3", trained / "unlike-ours")
    file = trained / "unlike-ours" / "adapter_config.json"
    wrong = {"init_lora_weights": "pissa_niter_4", "use_dora": True, "lora_bias": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError) as refused:
        AdapterFolder(trained / "unlike-ours", read_shape(FOLDER / "qwen3"))
    assert {fault.split(": ")[1].split(" ")[0] for fault in refused.value.faults} == set(wrong)
