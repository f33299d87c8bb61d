"""An export has the model's files as its run used them, for any options of the run."""

import json
import re
import shutil
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

from huggingface_models import FOLDER, NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.training.checkpoint.adapters import peft_tensor, stored_factors, targets
from paddlenlp_galvatron.training.checkpoint.companions import config_like, without_absent_code
from paddlenlp_galvatron.training.checkpoint.saving import WEIGHTS_ALONE, save_model
from paddlenlp_galvatron.training.prepare import prepare
from paddlenlp_galvatron.training.run import RankRun

JINJA = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
OTHER = JINJA.replace(":", ">")
TURNS = {"system": "s", "conversation": ["{{user}}?", "{{bot}}!"], "query": "{{query}}?"}
IDS = {"eos_token_id": [3, 4], "bos_token_id": 2, "pad_token_id": 0}
ENDS = {"temperature": 0.7, **IDS}  # generation_config.json


def write_tokenizer(folder: Path, template: str = JINJA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE(vocab={chr(code): code - 32 for code in range(32, 127)}, merges=[]))
    made.add_tokens([AddedToken("<|end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": template, "name": folder.name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, name: str = "qwen3_moe", **entries: Any) -> Path:
    """A model's folder as hubs have it."""
    shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("oracle*"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS | entries))
    (folder / "generation_config.json").write_text(json.dumps(ENDS))
    return write_tokenizer(folder)


CHANGES = {
    "num_layers": st.integers(2, 5),
    "max_position_embeddings": st.sampled_from([16, 64]),
    "intermediate_size": st.sampled_from([32, 48]),
    "hidden_size": st.sampled_from([32, 64]),
    "num_attention_heads": st.sampled_from([4, 8]),
    "vocab_size": st.sampled_from([131, 140]),
    "tie_word_embeddings": st.booleans(),
}


@settings(max_examples=150)
@given(
    name=st.sampled_from(NAMES),
    options=st.fixed_dictionaries({}, optional=CHANGES),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "initializer_range": st.sampled_from([0.01, 0.02]),
            "router_aux_loss_coef": st.sampled_from([0.0, 0.001, 0.5]),
        },
    ),
    balances=st.booleans(),
    older=st.booleans(),
)
def test_config_json_has_the_trained_shape_and_all_else_of_the_model(name, options, changes, balances, older):
    before = json.loads((FOLDER / name / "config.json").read_text()) | IDS | {"use_cache": False}
    before |= {"output_router_logits": True} if balances and "num_experts_per_tok" in before else {}
    before["layer_types"] = ["full_attention"] * before["num_hidden_layers"]
    if older and before.get("rope_parameters", {}).get("rope_type") == "default":  # as transformers 4 has it
        before |= {"rope_theta": before.pop("rope_parameters")["rope_theta"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(before))
        try:
            shape = ModelOptions.from_values({"model_size": str(path)} | options).resolve(16).shapes[0]
        except UserError:  # numbers that do not go together
            return
        shape = replace(shape, **{k: v for k, v in changes.items() if shape.experts or k == "initializer_range"})
        after = config_like(shape, path)
        path.write_text(json.dumps(after))
        if shape.family == "ernie4_5_moe":  # whose config cannot say it as we do
            shape = replace(shape, router_aux_loss_coef=0.0)
        assert load_model(path) == replace(shape, name=Path(folder).name)
    assert {"architectures", *IDS} <= after.keys() and all(after[key] == before[key] for key in IDS)
    assert after.get("num_nextn_predict_layers", 0) == shape.mtp_layers
    if shape.main_layers != before["num_hidden_layers"]:
        assert "layer_types" not in after  # transformers refuses a list of another length
    if not options and not changes:
        unlike = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert unlike <= {"dtype", "num_nextn_predict_layers"}


def converted(galvatron, root: Path, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The conversion of a run with these options, and its tensors."""
    folder = exported(galvatron, root, **options)
    shutil.rmtree(folder)
    return galvatron("convert", "g2h", root / "out", folder), load_file(folder / "model.safetensors")


def exported(galvatron, root: Path, trainer: bool = False, **options: Any) -> Path:
    """The export of a run with these options."""
    given = {"output_dir": root / "out", "max_steps": 1, "global_train_batch_size": 1, "global_tp_deg": 1}
    given |= {"input_dir": "random", "seq_length": 16}
    if "task" in options:
        (root / "data").mkdir()
        (root / "data" / "train.json").write_text(json.dumps({"src": "A", "tgt": "B"}) + "\n")
        given |= {"dataset_name_or_path": root / "data", "input_dir": None}
    given = {name: value for name, value in (given | options).items() if value is not None}
    run = RankRun.of(prepare(given, 1, root / "out").settings)
    if trainer:
        save_model(run.engine, root / "hf", run.origin)
        return root / "hf"
    writer = run.writer()
    writer.save(WEIGHTS_ALONE)
    writer.finish()
    ran = galvatron("convert", "g2h", root / "out", root / "hf")
    assert ran.code == 0 and re.fullmatch(r"(note: tensors are in float32, as trained; .*\n)?", ran.err), ran
    return root / "hf"


@pytest.mark.parametrize("trainer", [False, True], ids=["g2h", "trainer"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"model_size": "model", "router_aux_loss_coef": 0.25}, id="balance loss"),
        pytest.param({"model_size": "model/config.json", "initializer_range": 0.5}, id="config.json's path"),
        pytest.param({"load": "model", "set_seqlen_manually": True, "seq_length": 64}, id="positions of weights"),
        pytest.param({"model_size": "alone.json", "load": "model"}, id="numbers alone, weights of a folder"),
    ],
)
def test_an_export_has_the_models_files(galvatron, tmp_path, options, trainer):
    model = write_model(tmp_path / "model", auto_map={"AutoConfig": "configuration_own.Own", "AutoModel": "a/b--x.Y"})
    shutil.copy(model / "config.json", "alone.json")
    folder = exported(galvatron, tmp_path, trainer, **options)
    config = json.loads((folder / "config.json").read_text())
    assert config.items() >= {**IDS, "architectures": ["Qwen3MoeForCausalLM"]}.items()
    assert config["auto_map"] == {"AutoModel": "a/b--x.Y"}
    names = {"initializer_range": 0.5, "router_aux_loss_coef": 0.25}
    assert all(config[name] == value for name, value in names.items() if name in options)
    assert config["max_position_embeddings"] == options.get("seq_length", 32)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "template", "whose"),
    [
        pytest.param({}, JINJA, "model", id="the model's"),
        pytest.param({"chat_template": "other.jinja"}, OTHER, "model", id="a file"),
        pytest.param({"chat_template": "words"}, OTHER, "model", id="another tokenizer's"),
        pytest.param({"chat_template": "plain"}, None, "model", id="none"),
        pytest.param({"chat_template": "chat_template.json"}, None, "model", id="PaddleNLP's"),
        pytest.param({"tokenizer_name_or_path": "words"}, OTHER, "words", id="another tokenizer"),
        pytest.param({"tokenizer_name_or_path": "words/tokenizer.json"}, OTHER, "words", id="its file"),
        pytest.param({"task": None, "tokenizer_name_or_path": "words"}, OTHER, "words", id="pretraining"),
        pytest.param({"task": "lora"}, JINJA, "model", id="adapters"),
    ],
)
@pytest.mark.parametrize("jinja", [False, True], ids=["", "and chat_template.jinja"])
def test_an_export_has_the_tokenizer_and_the_template_of_the_run(galvatron, tmp_path, options, template, whose, jinja):
    model = write_model(tmp_path / "model", "qwen3_moe" if options.get("task") == "lora" else "llama")
    write_tokenizer(tmp_path / "words", OTHER)
    if jinja:  # which transformers prefers to that of tokenizer_config.json
        (model / "chat_template.jinja").write_text(JINJA)
    (tmp_path / "other.jinja").write_text(OTHER)
    (tmp_path / "chat_template.json").write_text(json.dumps(TURNS))
    options = {name: value for name, value in ({"task": "sft"} | options).items() if value}
    folder = exported(galvatron, tmp_path, **{"model_size": "model", **options})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    file = folder / "chat_template.jinja"
    assert (file.read_text() if file.exists() else config.get("chat_template")) == template
    assert config["name"] == whose and config["eos_token"] == "<|end|>"
    turns = folder / "chat_template.json"
    assert turns.exists() == (options.get("chat_template") == turns.name)
    assert not turns.exists() or json.loads(turns.read_text()) == TURNS
    assert json.loads((folder / "generation_config.json").read_text()) == ENDS
    if options.get("task") == "lora":  # the merged model has them, too, for any files of its base
        adapters = json.loads((folder / "adapter_config.json").read_text())
        assert Path(adapters["base_model_name_or_path"]) == model
        ran = galvatron("convert", "g2h", "out", "half", "--dtype", "bf16")
        assert ran.code == 2 and "dtype: bf16, but adapters are written in fp32" in ran.err
        write_tokenizer(model, OTHER)
        (model / "chat_template.jinja").write_text(OTHER)
        assert galvatron("convert", "merge", model, folder, tmp_path / "merged").code == 0
        assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == config
        assert (tmp_path / "merged" / "chat_template.jinja").exists() == jinja


def test_code_that_an_export_has_stays_named(tmp_path):
    (tmp_path / "modeling_own.py").write_text("")
    code = {"AutoModel": "modeling_own.Own", "AutoTokenizer": ["tokens.Own", None], "AutoConfig": "configuration.Own"}
    assert without_absent_code({"auto_map": code, "x": 1}, tmp_path) == {
        "auto_map": {"AutoModel": "modeling_own.Own"},
        "x": 1,
    }


@pytest.mark.parametrize(
    "of_fp32", [("mlp.gate",), ("norm",), ("embed_tokens", "lm_head"), ("mlp.gate", "norm", "embed_tokens")], ids=str
)
def test_each_tensor_keeps_its_type(galvatron, tmp_path, of_fp32):
    model = write_model(tmp_path / "model")
    tensors = {name: tensor for file in model.glob("model*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        tensors[name] = tensor.astype(np.float32 if name.removesuffix(".weight").endswith(of_fp32) else bfloat16)
    save_file(tensors, model / "model.safetensors")
    assert galvatron("convert", "h2g", model, tmp_path / "g").code == 0
    for words in ((), ("--max_shard_mib", 1)):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        ran = galvatron("convert", "g2h", tmp_path / "g", tmp_path / "hf", *words)
        assert ran.code == 0 and "in bf16" in ran.out
        after = load_file(tmp_path / "hf" / "model.safetensors")
        assert all(after[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert galvatron("convert", "g2h", tmp_path / "g", tmp_path / "all", "--dtype", "fp16").code == 0
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "all" / "model.safetensors").values()} == {"float16"}


def test_a_trained_model_has_the_types_of_its_plan_and_a_note_says_so(galvatron, tmp_path):
    model = write_model(tmp_path / "model")
    tensors = {name: tensor for file in model.glob("model*.safetensors") for name, tensor in load_file(file).items()}
    wide = {name for name in tensors if name.endswith("mlp.gate.weight")}
    tensors = {name: tensor.astype(np.float32 if name in wide else np.float16) for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors")
    ran, after = converted(galvatron, tmp_path / "fp32", model_size=str(model), load=model)
    assert "note: tensors are in float32, as trained; the model came in float16: " in ran.err
    assert {tensor.dtype for tensor in after.values()} == {np.dtype(np.float32)}
    ran, after = converted(galvatron, tmp_path / "fp16", model_size=str(model), load=model, mixed_precision="fp16")
    assert "note: " not in ran.err
    assert {name: after[name].dtype for name in tensors} == {name: tensors[name].dtype for name in tensors}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param(lambda folder: None, "", id="the same files"),
        pytest.param(lambda folder: write_tokenizer(folder, OTHER), "tokenizer_config.json: ", id="another template"),
        pytest.param(
            lambda folder: (folder / "chat_template.jinja").write_text(OTHER), "chat_template.jinja: ", id="one more"
        ),
        pytest.param(lambda folder: (folder / "generation_config.json").unlink(), "generation_config", id="one less"),
    ],
)
def test_files_of_another_folder_are_noted(galvatron, tmp_path, change, names):
    model, like = write_model(tmp_path / "model", "llama"), write_model(tmp_path / "like", "llama")
    write_tokenizer(like).joinpath("tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes())
    change(like)
    assert galvatron("convert", "h2g", model, tmp_path / "g").code == 0
    ran = galvatron("convert", "g2h", tmp_path / "g", tmp_path / "hf", "--like", like)
    assert ran.code == 0 and ran.err.count("note: ") == bool(names) and names in ran.err, ran


def write_adapters(folder: Path, model: Path, changed: str = "", value: float = 0.0, **config: Any) -> Path:
    """PEFT's adapters of a model; `changed`: tensors of which a number, or with 0 all, are of that value."""
    folder.mkdir()
    random, tensors = np.random.default_rng(0), {}
    for factor in stored_factors(load_model(model), 2):
        tensors[factor.peft] = random.normal(0, 0.1, factor.shape[::-1]).astype(np.float32)
        if changed and changed in factor.peft:
            tensors[factor.peft].reshape(-1)[: None if value == 0 else 1] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "model"} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        *(
            pytest.param({"init_lora_weights": name}, f"init_lora_weights is {name}, which may change", id=name)
            for name in ("lora_ga", "LoRA_GA", "OLoRA", "pissa_niter_4", "PiSSA", "corda", "loftq", "unknown")
        ),
        pytest.param({"changed": "0.mlp.up_proj.lora_B", "value": np.nan}, "0.mlp.up_proj.lora_B.weight has", id="NaN"),
        pytest.param({"changed": "0.mlp.up_proj.lora_A", "value": -np.inf}, "0.mlp.up_proj.lora_A.weight", id="Inf"),
        pytest.param({"lora_alpha": -5}, "r and lora_alpha must be numbers above 0", id="alpha below 0"),
        pytest.param({"lora_alpha": 0.0}, "r and lora_alpha must be numbers above 0", id="alpha 0"),
        pytest.param({"lora_alpha": 1e308}, "with them has numbers that are NaN or infinite", id="too large an alpha"),
        pytest.param({"lora_alpha": 1e42}, "with them has numbers that are NaN or infinite", id="beyond fp32"),
        pytest.param({"use_rslora": "false"}, "use_rslora is 'false'; write true or false", id="a text as flag"),
        pytest.param({"use_dora": "false"}, "use_dora is false, but False alone", id="a text as another flag"),
        pytest.param({"peft_type": "ADALORA"}, "peft_type is ADALORA", id="another kind"),
        *(
            pytest.param({name: value}, f"{name} is {value}, but", id=name)
            for name, value in [("kasa_config", {"beta": 1}), ("velora_config", {}), ("use_new", True)]
        ),
    ],
)
def test_adapters_that_do_not_give_what_was_trained_are_refused(galvatron, tmp_path, changes, fault):
    model = write_model(tmp_path / "model", "llama")
    folder = write_adapters(tmp_path / "adapters", model, **changes)
    ran = galvatron("convert", "merge", model, folder, tmp_path / "merged")
    assert ran.code == 2 and fault in ran.err and ran.err.count("\n") == 1, ran
    assert not (tmp_path / "merged").exists()


def fused(folder: Path, target: Path, model: Path, halves: bool) -> Path:
    """The same adapters in PEFT's form for fused experts: with `halves` as it converts them, else with a lora_A for
    gate and up, which is gate's."""
    target.mkdir()
    stored, tensors = load_file(folder / "adapter_model.safetensors"), {}
    of_names, peft = defaultdict(list), {}
    for factor in stored_factors(load_model(model), 2):
        of_names[factor.fused].append(factor)
        peft[factor.name] = factor.peft
    for name, factors in of_names.items():
        first, *others = [
            np.stack([stored[each.peft] for each in factors if each.product == n])
            for n in range(3)
            if any(each.product == n for each in factors)
        ]
        joined = first
        if others and factors[0].is_first:
            joined = np.concatenate([first, *others], 1) if halves else first
        elif others:
            zeros = np.zeros_like(first)
            both = [[first, zeros], [zeros, *others]] if halves else [[first], others]
            joined = np.concatenate([np.concatenate(row, 2) for row in both], 1)
        if factors[0].expert is None:
            tensors[name] = joined[0]
        else:
            flat = joined if factors[0].is_first else joined.transpose(1, 2, 0)
            size = (-1, joined.shape[2]) if factors[0].is_first else (joined.shape[1], -1)
            tensors[name] = np.ascontiguousarray(flat.reshape(size))
        written = peft_tensor(name, factors, lambda key, *_: stored[peft[key]].T)
        assert not halves or (written.shape == tensors[name].shape and np.array_equal(written.read(), tensors[name]))
    save_file(tensors, target / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"target_parameters": ["gate_up_proj", "down_proj"]}
    config |= {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 8}} if halves else {}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("halves", [False, True])
def test_adapters_of_fused_experts_are_those_of_each(galvatron, tmp_path, name, halves):
    model = write_model(tmp_path / "model", name)
    each = write_adapters(tmp_path / "each", model)
    if not halves:
        tensors = load_file(each / "adapter_model.safetensors")
        for factor in stored_factors(load_model(model), 2):
            if factor.expert is not None and factor.product == 1 and factor.is_first:
                gate = "w1" if name == "mixtral" else "gate_proj"
                tensors[factor.peft] = tensors[factor.peft.replace(factor.projection, gate)]
        save_file(tensors, each / "adapter_model.safetensors")
    together = fused(each, tmp_path / "together", model, halves)
    config = targets(list(stored_factors(load_model(model), 2)), Adapters(2, 4.0, rslora=halves))
    parameters, shared = config.get("target_parameters", []), name == "qwen2_moe"
    assert bool(parameters) == (shared or halves) and ("shared_expert.gate_proj.weight" in parameters) == shared
    assert [*config.get("alpha_pattern", {}).values()] == ([2**0.5 * 4 if halves else 8] if parameters else []), config
    for folder in (each, together):
        assert galvatron("convert", "merge", model, folder, f"{folder}-merged").code == 0
    merged, expected = (load_file(f"{folder}-merged/model.safetensors") for folder in (together, each))
    assert all(np.array_equal(merged[key], expected[key]) for key in expected)
    tensors = load_file(together / "adapter_model.safetensors")
    wrong = {"base_model.model.model.layers.1.mlp.gate.lora_A.weight": np.zeros((2, 32), np.float32)}
    save_file(tensors | wrong, together / "adapter_model.safetensors")
    ran = galvatron("convert", "merge", model, together, tmp_path / "wrong")
    assert ran.code == 2 and "mlp.gate.lora_A.weight, which is no adapter of this model; routers get no" in ran.err


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        *(
            pytest.param({"init_lora_weights": name}, "", id=str(name))
            for name in (True, False, None, "gaussian", "EVA", "orthogonal", "mica")
        ),
        pytest.param({"base_model_name_or_path": "meta/Other"}, "base_model_name_or_path is meta/Other", id="other"),
        pytest.param({"base_model_name_or_path": "own/Model/"}, "", id="a repository of that name"),
        pytest.param({"base_model_name_or_path": "hub/org-model"}, "", id="the name in config.json"),
        pytest.param({"base_model_name_or_path": "/x/models--own--model/snapshots/0a1"}, "", id="a hub's cache"),
        pytest.param({"base_model_name_or_path": None}, "", id="no base"),
        pytest.param({"changed": "lora_B"}, "all lora_B are 0, so the result is the base", id="nothing learnt"),
        pytest.param({"changed": "layers.0.mlp.up_proj.lora_B"}, "", id="some are 0"),
    ],
)
def test_adapters_are_merged_with_a_note_on_doubts(galvatron, tmp_path, changes, note):
    model = write_model(tmp_path / "model", "llama", _name_or_path="some/org-model")
    folder = write_adapters(tmp_path / "adapters", model, **changes)
    ran = galvatron("convert", "merge", model, folder, tmp_path / "merged")
    assert ran.code == 0 and note in ran.err and ran.err.count("note: ") == bool(note), ran
