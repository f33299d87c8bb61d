"""`galvatron convert` and its scripts."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from huggingface_models import FOLDER
from safetensors.numpy import load_file

from paddlenlp_galvatron.plan import load_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
TIED, LLAMA = FOLDER / "qwen2-tied", FOLDER / "llama"


def test_there_and_back(galvatron, tmp_path):
    ran = galvatron("convert", "h2g", TIED, tmp_path / "converted", "--family", "qwen")
    assert ran.code == 0 and "converted: qwen2, 3 layers, 27648 weights in fp32" in ran.out
    ran = galvatron("convert", "g2h", tmp_path / "converted", tmp_path / "back")
    assert ran.code == 0 and "back: qwen2, 3 layers, 27648 weights in fp32" in ran.out
    before, after = load_file(TIED / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


def test_options_of_the_way_back(galvatron, tmp_path):
    galvatron("convert", "h2g", LLAMA, tmp_path / "converted")
    like = Path(shutil.copytree(LLAMA, tmp_path / "like"))
    (like / "tokenizer.json").write_text("{}")
    options = ["--dtype", "fp16", "--max_shard_mib", "1", "--like", like]
    assert galvatron("convert", "g2h", tmp_path / "converted", tmp_path / "back", *options).code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float16"
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "back" / "model.safetensors").values()} == {"float16"}


def test_files_of_tokenizer_and_templates_come_back(galvatron, tmp_path):
    source = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    kept = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model",
            "spiece.model", "tokenizer.model.v3", "qwen.tiktoken", "tokenization_own.py", "chat_template.jinja",
            "chat_template.json", "additional_chat_templates/tools.jinja"}  # fmt: skip
    (source / "additional_chat_templates").mkdir()
    for name in kept:
        (source / name).write_text(f"of {name}")
    for name in ("README.md", "training_args.bin", "additional_chat_templates/left.tmp"):
        (source / name).write_text("not the model's")
    (source / "tokenizer_links.json").symlink_to("nowhere")
    assert galvatron("convert", "h2g", source, tmp_path / "converted").code == 0
    assert galvatron("convert", "g2h", tmp_path / "converted", tmp_path / "back").code == 0
    there = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert there == kept | {"config.json", "model.safetensors"}
    assert all((tmp_path / "back" / name).read_text() == f"of {name}" for name in kept)


@pytest.mark.parametrize("fields", [{"hidden_act": "relu"}, {"num_hidden_layers": 1}, {"rope_theta": 1.0}, None])
def test_a_runs_own_folder_can_always_be_exported(galvatron, tmp_path, fields):
    """For any content of its config.json: an earlier version read the file otherwise."""
    galvatron("convert", "h2g", LLAMA, tmp_path / "converted")
    path = tmp_path / "converted" / "config.json"
    path.write_text("{" if fields is None else json.dumps(json.loads(path.read_text()) | fields))
    ran = galvatron("convert", "g2h", tmp_path / "converted", tmp_path / "back")
    assert ran.code == 0 and "note: config.json is written from the trained model: " in ran.err
    assert load_model(tmp_path / "back") == replace(load_model(LLAMA), name="back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["hidden_act"] == "silu"


def test_mistakes_are_one_line_and_leave_nothing(galvatron, tmp_path):
    galvatron("convert", "h2g", TIED, tmp_path / "converted")
    (tmp_path / "empty").mkdir()
    for words, message in [
        (("h2g", LLAMA, tmp_path / "a", "--family", "qwen"), f"{LLAMA}: holds a llama, but --family says qwen"),
        (("h2g", TIED, tmp_path / "a", "--family", "qwen3"), f"{TIED}: holds a qwen2, but --family says qwen3"),
        (
            ("g2h", tmp_path / "converted", tmp_path / "a", "--family", "llama"),
            "holds a qwen2, but --family says llama",
        ),
        (("h2g", LLAMA, tmp_path / "converted"), "converted: exists already; remove it or name another folder"),
        (("h2g", tmp_path / "none", tmp_path / "a"), "none: no such folder; name that of a Hugging Face model"),
        (("g2h", tmp_path / "empty", tmp_path / "a"), "empty/index.json: no such file"),
        (("g2h", LLAMA, tmp_path / "a"), "llama/index.json: no such file"),
        (("g2h", tmp_path / "converted", tmp_path / "a", "--like", LLAMA), "family is llama, but qwen2 in the model"),
        (("g2h", tmp_path / "converted", tmp_path / "a", "--dtype", "int8"), "dtype: must be"),
    ]:
        ran = galvatron("convert", *words)
        assert ran.code == 2 and ran.out == "" and message in ran.err, ran
    assert {path.name for path in tmp_path.iterdir()} == {"converted", "empty"}


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_scripts_pass_on_their_variables(tmp_path, shell, family):
    scripts = Path(shutil.copytree(SCRIPTS, tmp_path / "my scripts"))
    paths = {"INPUT_PATH": "in put", "OUTPUT_PATH": "out/put", "GALVATRON": "echo"}
    for name, command in {"_h2g": "h2g", "_g2h": "g2h"}.items():
        stated = subprocess.run(
            [shell, scripts / f"convert_{family}{name}.sh", "--more"],
            cwd=tmp_path,
            env=os.environ | paths,
            capture_output=True,
            text=True,
            check=True,
        )
        assert stated.stdout == f"convert {command} in put out/put --family {family} --more\n"
