"""Hugging Face models: results equal transformers', also under other configs, and they come back unchanged."""

import errno
import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
import pytest
from huggingface_models import FOLDER, NAMES, TOLERANCE, oracle_of
from safetensors import safe_open
from safetensors.numpy import save_file

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.plan import Precision, load_model
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.weights import SeededWeights, Slice, WeightSource
from paddlenlp_galvatron.training.checkpoint import convert, huggingface
from paddlenlp_galvatron.training.checkpoint import stored as checkpoints
from paddlenlp_galvatron.training.checkpoint.convert import precision_of, to_checkpoint, to_huggingface, write_model
from paddlenlp_galvatron.training.checkpoint.huggingface import HuggingFaceWeights, modules, read_shape
from paddlenlp_galvatron.training.checkpoint.loading import weights_from
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint
from paddlenlp_galvatron.training.checkpoint.weight_files import Tensor, write_tensors
from paddlenlp_galvatron.training.recipe import Recipe

MIB = 2**20
STOCK_NAMES = [name for name in NAMES if read_shape(FOLDER / name).traits.stock]  # PaddleNLP has such a model


def ignore(_: int) -> None:
    """Nobody watches."""


def ignore_all(*_: object) -> None:
    """Nothing is looked at."""


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, in the type they are stored in."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def converted(name, tmp_path_factory) -> Path:
    """The model as a checkpoint."""
    folder = tmp_path_factory.mktemp("converted") / name
    to_checkpoint(FOLDER / name, read_shape(FOLDER / name), folder, ignore)
    return folder


@pytest.fixture(params=["directory", "checkpoint"])
def weights(name, converted, request):
    folder = FOLDER / name if request.param == "directory" else converted
    return weights_from(folder, read_shape(FOLDER / name))


def test_logits_and_training_are_those_of_transformers(name, weights):
    shape, oracle = read_shape(FOLDER / name), oracle_of(name)
    out = paddlenlp_model(name, weights)(paddle.to_tensor(oracle.tokens[0, :, :-1]))
    logits = out[0] if isinstance(out, tuple) else out
    assert np.abs(logits.numpy() - oracle.logits).max() < TOLERANCE
    trained = train_one_process(shape, oracle.seq_length, weights, Recipe(**oracle.recipe), oracle.tokens)
    assert [loss for loss, _ in trained] == pytest.approx(oracle.losses, abs=TOLERANCE)


def paddlenlp_model(name: str, weights: WeightSource) -> Any:
    shape = read_shape(FOLDER / name)
    family = load_family(shape.family)
    model = family.whole_model(shape, family.config(shape, oracle_of(name).seq_length))
    for key, weight in model.named_parameters():
        weight.set_value(weights(key, tuple(weight.shape)))
    return model


@pytest.mark.parametrize("name", STOCK_NAMES, indirect=True, scope="module")
def test_what_paddlenlp_saves_is_read_too(name, weights, tmp_path):
    paddlenlp_model(name, weights).save_pretrained(tmp_path / name, safe_serialization=True, max_shard_size="40KB")
    saved = weights_from(tmp_path / name, read_shape(FOLDER / name))
    for weight in (weight for module in modules(read_shape(FOLDER / name)) for weight in module):
        assert (saved(weight.name, weight.shape) == weights(weight.name, weight.shape)).all()


def test_a_part_is_that_of_the_whole(name, weights):
    for weight in (weight for module in modules(read_shape(FOLDER / name)) for weight in module):
        whole = weights(weight.name, weight.shape)
        assert whole.shape == weight.shape and whole.dtype == np.float32
        for axis, length in enumerate(weight.shape):
            for parts in (2, 5, 3 * length):  # with the last, most parts are padding alone
                padded = -(-length // parts) * parts
                for index in (0, parts // 2, parts - 1):
                    part = Slice(axis, index, parts, padded)
                    assert (weights(weight.name, weight.shape, part) == part.of(whole)).all()


def test_the_way_back_gives_the_same_tensors_in_files_of_the_size_asked_for(name, converted, tmp_path):
    checkpoint, back = open_checkpoint(converted), tmp_path / "back"
    to_huggingface(checkpoint, back, precision_of(checkpoint), 20_000, None, ignore)
    given, returned = tensors_of(FOLDER / name), tensors_of(back)
    assert given.keys() == returned.keys()
    for key, tensor in given.items():
        assert tensor.dtype == returned[key].dtype and tensor.shape == returned[key].shape
        assert tensor.tobytes() == returned[key].tobytes(), key
    files = sorted(path.name for path in back.glob("model-*"))
    assert files == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
    assert all(sum(tensor.nbytes for tensor in safe_tensors(back / file)) <= 20_000 for file in files)
    HuggingFaceWeights(back, read_shape(FOLDER / name))  # the index names each tensor's file
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER / name, back))
    before |= {field: 0 for field in before if field == "num_nextn_predict_layers"}  # such layers are left out
    assert after.pop("torch_dtype") == before.pop("dtype") and after == before
    assert (back / "generation_config.json").read_bytes() == (FOLDER / name / "generation_config.json").read_bytes()


def safe_tensors(path: Path) -> list[np.ndarray]:
    with safe_open(path, framework="numpy") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def test_another_type_rounds_and_one_that_is_too_small_is_refused(tmp_path):
    source = FOLDER / "qwen2-tied"
    to_checkpoint(source, read_shape(source), tmp_path / "a", ignore)
    checkpoint = open_checkpoint(tmp_path / "a")
    to_huggingface(checkpoint, tmp_path / "b", Precision.BF16, 10 * MIB, source, ignore)
    for key, tensor in tensors_of(source).items():
        assert (tensors_of(tmp_path / "b")[key] == tensor.astype(Precision.BF16.dtype)).all()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    large = Tensor("x", (1,), lambda: np.array([1e5], np.float32))
    with pytest.raises(UserError, match="x: has numbers that fp16 cannot hold; choose bf16"):
        write_tensors(tmp_path / "x", [large], Precision.FP16, ignore)


def test_the_bias_of_the_choice_of_experts_stays_fp32(tmp_path):
    source = FOLDER / "deepseek_v3"
    to_checkpoint(source, read_shape(source), tmp_path / "a", ignore)
    to_huggingface(open_checkpoint(tmp_path / "a"), tmp_path / "b", Precision.BF16, 10 * MIB, source, ignore)
    given, rounded = tensors_of(source), tensors_of(tmp_path / "b")
    types = {key: rounded[key].dtype for key in given}
    assert {key for key in types if types[key] == np.float32} == {key for key in given if key.endswith("_bias")}
    assert all((given[key] == rounded[key]).all() for key in given if key.endswith("_bias"))
    assert HuggingFaceWeights(tmp_path / "b", read_shape(source)).precision is Precision.BF16


def test_mtp_goes_both_ways_or_is_left_out_by_name(tmp_path, capsys):
    source, folder, place = FOLDER / "deepseek_v3", tmp_path / "with", "model.layers.3."
    shape, config = load_model(source), json.loads((source / "config.json").read_text())
    assert read_shape(source).mtp_layers == 0 < shape.mtp_layers  # transformers saves no tensors of it
    write_model(shape, SeededWeights(1, 0.02), folder, config, (Precision.FP32, {}), 10**9, {}, ignore)
    tensors = tensors_of(folder)
    names = {key.removeprefix(place) for key in tensors if key.startswith(place)}
    tables = {"embed_tokens.weight", "shared_head.head.weight"}
    assert names > tables | {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    assert tensors[f"{place}eh_proj.weight"].shape == (shape.hidden_size, 2 * shape.hidden_size)
    to_checkpoint(folder, read_shape(folder), tmp_path / "a", ignore)
    to_huggingface(open_checkpoint(tmp_path / "a"), tmp_path / "b", None, 10**9, None, ignore)
    back = tensors_of(tmp_path / "b")
    assert back.keys() == tensors.keys() and all((back[key] == tensors[key]).all() for key in tensors)
    to_checkpoint(folder, shape.having(3, 0), tmp_path / "c", ignore)
    assert "MTP is left out (num_nextn_predict_layers 0): 4" in capsys.readouterr().err
    for count, name in enumerate("cb"):
        assert json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"] == count
    save_file(tensors | {f"{place}embed_tokens.weight": tensors["lm_head.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"3.embed_tokens.weight is not model.embed_tokens.weight, which config.json"):
        to_checkpoint(folder, shape, tmp_path / "d", ignore)
    save_file({key: tensors[key] for key in tensors if "enorm" not in key}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks tensor model.layers.3.enorm.weight, .*num_nextn_predict_layers 0"):
        to_checkpoint(folder, shape, tmp_path / "d", ignore)
    save_file(
        tensors_of(source) | {"model.layers.2.eh_proj.weight": np.ones(4, np.float32)}, folder / "model.safetensors"
    )
    with pytest.raises(UserError, match=r"has tensor model.layers.2.eh_proj.weight, which no deepseek_v3 has"):
        HuggingFaceWeights(folder, read_shape(folder))


def test_no_more_than_a_few_of_the_largest_weight_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "BLOCK_BYTES", 2**16)  # for a checksum, which is more than this small model
    source = FOLDER / "llama"
    fields = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 16, "head_dim": 32, "vocab_size": 512}
    config = json.loads((source / "config.json").read_text()) | fields
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path / "hf")
    drawn = SeededWeights(0, 0.02)
    listed = [weight for module in modules(shape) for weight in module]
    write_tensors(
        tmp_path / "hf" / "model.safetensors",
        [Tensor(w.tensor, w.tensor_shape, partial(drawn, w.tensor, w.tensor_shape)) for w in listed],
        Precision.BF16,
        ignore,
    )
    largest = max(math.prod(weight.shape) for weight in listed) * 4
    assert shape.parameters * 4 > 50 * largest

    def peak(work: Callable[[], object], times: int = 3) -> float:
        """Most memory that the work has at once, by the largest weight's: of several times the one without memory that
        is made once, or by another thread, or grows at that moment, as the interpreter's table of strings does."""
        most = []
        for _ in range(times):
            tracemalloc.start()
            work()
            most.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return min(most) / largest

    assert peak(lambda: to_checkpoint(tmp_path / "hf", shape, fresh(tmp_path / "out"), ignore)) < 4
    to_checkpoint(tmp_path / "hf", shape, tmp_path / "g", ignore)
    checkpoint = open_checkpoint(tmp_path / "g")
    bf16, shard = Precision.BF16, 100 * MIB
    assert peak(lambda: to_huggingface(checkpoint, fresh(tmp_path / "out"), bf16, shard, None, ignore)) < 4
    [gate] = [weight for weight in listed if weight.name.endswith("layers.3.mlp.gate_proj.weight")]
    for source_of in (weights_from(tmp_path / "hf", shape), weights_from(tmp_path / "g", shape)):
        for axis in (0, 1):
            assert peak(partial(source_of, gate.name, gate.shape, Slice(axis, 1, 8)), times=20) < 1 / 2


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of a model, in one file again."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def with_tensor(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: value}))


def with_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


WRONG = {
    "a tensor is missing": (
        without("model.layers.1.self_attn.q_proj.bias"),
        "model: lacks tensor model.layers.1.self_attn.q_proj.bias, which its config.json asks for",
    ),
    "a tensor that no such model has": (
        with_tensor("model.layers.0.lora_A", np.zeros(3)),
        "model: has tensor model.layers.0.lora_A, which no qwen2 has",
    ),
    "a shape": (
        with_tensor("model.norm.weight", np.zeros(31, np.float32)),
        r"model.safetensors: tensor model.norm.weight has shape \(31,\) instead of \(32,\)",
    ),
    "a type": (
        with_tensor("model.norm.weight", np.zeros(32, np.int8)),
        "model.safetensors: tensor model.norm.weight is of type I8; supported: F32",
    ),
    "cut off": (cut, "model.safetensors: cannot be read: .*; is it cut off, or not downloaded?"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "model: has neither model.safetensors nor model.safetensors.index.json",
    ),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not valid JSON"),
    "another model": (with_config(num_key_value_heads=1), "config.json: kv_heads is 1, but 2 in the model model"),
    "another family": (with_config(model_type="llama"), "config.json: family is llama, but qwen2 in the model model"),
    "scaled positions": (with_config(rope_scaling={"type": "linear", "factor": 2}), "config.json: rope_scaling is"),
    "scaled positions in a word": (with_config(rope_scaling="linear"), "config.json: rope_scaling is linear"),
    "another activation": (with_config(hidden_act="gelu"), "config.json: hidden_act is gelu; silu alone is supported"),
    "other heads": (with_config(head_dim=16), "config.json: own_head_dim is 16, but None in the model model"),
    "quantised": (with_config(quantization_config={}), "config.json: quantization_config: the weights are quantised"),
}


@pytest.fixture
def model(tmp_path) -> Path:
    """A model of its own, which may be damaged."""
    return Path(shutil.copytree(FOLDER / "qwen2-tied", tmp_path / "model"))


@pytest.mark.parametrize(("damage", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_directory_is_named(model, damage, message):
    shape = load_model(model)
    damage(model)
    with pytest.raises(UserError, match=message):
        weights_from(model, shape)


@pytest.mark.parametrize("converted", [False, True], ids=["Hugging Face", "checkpoint"])
def test_weights_that_are_not_finite_are_named(model, tmp_path, monkeypatch, converted):
    shape, name = load_model(model), "model.norm.weight"
    with_tensor(name, np.array([math.nan] + 31 * [1.0], np.float32))(model)
    if converted:  # by a version that let it pass
        monkeypatch.setattr(huggingface, "require_finite", ignore_all)
        to_checkpoint(model, shape, tmp_path / "converted", ignore)
    source = weights_from(tmp_path / "converted" if converted else model, shape)
    place = r"converted: tensor qwen2.norm.weight" if converted else f"model.safetensors: tensor {name}"
    with pytest.raises(UserError, match=f"{place} has numbers that are NaN or infinite"):
        source("qwen2.norm.weight", (32,))


def test_what_is_wrong_with_shards_is_named(tmp_path):
    folder = Path(shutil.copytree(FOLDER / "llama", tmp_path / "model"))
    shape = load_model(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors: is missing"):
        weights_from(folder, shape)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index.json: weight_map is missing"):
        weights_from(folder, shape)
    for name in (1, None, ["x"], "../secret.safetensors", "/etc/passwd", ""):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(UserError, match=r"index.json: weight_map: .* which is no file's name"):
            weights_from(folder, shape)


def test_what_is_wrong_with_a_checkpoint_is_named(model, tmp_path):
    shape = load_model(model)
    to_checkpoint(model, shape, tmp_path / "converted", ignore)
    with pytest.raises(UserError, match=r"converted/index.json: rope_theta is 10000.0, but 1.0 in the model model"):
        weights_from(tmp_path / "converted", replace(shape, rope_theta=1.0))
    weights_from(tmp_path / "converted", replace(shape, max_position_embeddings=4096, name="longer"))
    file = tmp_path / "converted" / "module-00001.safetensors"
    *rest, last = file.read_bytes()
    file.write_bytes(bytes([*rest, last ^ 1]))
    with pytest.raises(UserError, match=r"module-00001.safetensors: its content is not as written"):
        weights_from(tmp_path / "converted", shape)
    with pytest.raises(UserError, match=r"is neither a Hugging Face model .* nor a checkpoint"):
        weights_from(tmp_path, shape)


def test_buffers_and_a_head_that_is_the_embedding_do_no_harm(model):
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(4, np.float32))(model)
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    shape = load_model(model)
    with_both, plain = weights_from(model, shape), weights_from(FOLDER / "qwen2-tied", shape)
    for weight in (weight for module in modules(shape) for weight in module):
        assert (with_both(weight.name, weight.shape) == plain(weight.name, weight.shape)).all()


def test_a_folder_is_written_whole_or_not_at_all(model, tmp_path, monkeypatch):
    shape, out = load_model(model), tmp_path / "out"
    left = tmp_path / ".out.01234567.part" / "left"  # by a conversion that was killed
    left.mkdir(parents=True)
    (tmp_path / "out.part").mkdir()  # somebody else's

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_tensors", full)
        with pytest.raises(GalvatronError, match="out: cannot be written: No space left on device"):
            to_checkpoint(model, shape, out, ignore)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.part"}
    left.mkdir(parents=True)
    to_checkpoint(model, shape, out, ignore)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.part", "out"} and not (out / "left").exists()
    with pytest.raises(UserError, match="out: exists already"):
        to_checkpoint(model, shape, out, ignore)


ROWS = json.loads((FOLDER / "configs.json").read_text())["configs"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['fields']}"[:60])
def test_losses_under_another_config_are_those_of_transformers(row: dict[str, Any], tmp_path: Path) -> None:
    folder, oracle = tmp_path / "model", oracle_of(row["model"])
    shutil.copytree(FOLDER / row["model"], folder)
    config = json.loads((folder / "config.json").read_text()) | row["fields"]
    config = {field: value for field, value in config.items() if value is not None or field not in row["fields"]}
    (folder / "config.json").write_text(json.dumps(config))
    shape = load_model(folder)
    recipe = Recipe(**oracle.recipe)
    ((loss, _),) = train_one_process(shape, oracle.seq_length, weights_from(folder, shape), recipe, oracle.tokens[:1])
    assert loss == pytest.approx(row["loss"], abs=TOLERANCE)
    if row["model"] != "mixtral":  # whose config states the default
        assert abs(loss - oracle.losses[0]) > 10 * TOLERANCE


@pytest.mark.parametrize("changed", [{"hidden_act": "relu"}, {"rope_parameters": {"rope_theta": 7.0}}])
def test_a_checkpoint_whose_config_is_read_otherwise_now_is_exported_as_it_was_trained(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    shape = load_model(FOLDER / "llama")
    to_checkpoint(FOLDER / "llama", shape, tmp_path / "checkpoint", lambda _: None)
    config = tmp_path / "checkpoint" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    to_huggingface(checkpoint, tmp_path / "out", precision_of(checkpoint), 10**6, None, lambda _: None)
    assert weights_from(tmp_path / "out", shape) and load_model(tmp_path / "out").rope_theta == shape.rope_theta
