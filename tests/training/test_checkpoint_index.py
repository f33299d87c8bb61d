"""A checkpoint's index is checked before anything is done with it, right checksum or not."""

import copy
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.limits import MOST_LAYERS, MOST_SIZE
from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.training.checkpoint.stored import (
    INDEX,
    BrokenCheckpoint,
    open_checkpoint,
    verify,
    whole_checkpoints,
    write_index,
)

SHAPE = ModelShape("tiny", "llama", 1, 4, 4, heads=2, kv_heads=2, vocab_size=8, max_position_embeddings=8)
FILE = "rank-00000.safetensors"
CONTENT = b"\0" * 800  # of 188 weights
WHOLE_SLICE = {"axis": None, "index": 0, "parts": 1, "padded": None}
PART = {"weight": "w", "shape": [4, 47], "slice": WHOLE_SLICE, "start": 0, "stop": 188, "offset": 0}
STORED = {"file": FILE, "bytes": 800, "crc32": zlib.crc32(CONTENT), "tensors": [{"key": "00000", "parts": [PART]}]}
WHOLE = {
    "format": 2, "step": 3, "model": asdict(SHAPE), "model_fingerprint": SHAPE.fingerprint, "plan": None,
    "precision": "bf16", "optimizer": {"beta1_pow_acc": 0.5}, "loss_scale": [1024.0, 3],
    "data": {"samples": 12, "global_batch": 4, "identity": {"seed": 1}}, "files": [STORED],
}  # fmt: skip


def written(folder: Path, index: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_index(folder, index)
    (folder / FILE).write_bytes(CONTENT)
    return folder


@pytest.mark.parametrize("large", [{"layers": MOST_LAYERS}, {"vocab_size": MOST_SIZE}])
def test_a_model_of_which_little_is_stored_is_named(tmp_path, large):
    """Before memory is taken for it."""
    shape = replace(SHAPE, **large)
    index = {**WHOLE, "model": asdict(shape), "model_fingerprint": shape.fingerprint}
    with pytest.raises(BrokenCheckpoint, match=f"model: has {shape.parameters} weights, of which 188 are stored"):
        open_checkpoint(written(tmp_path / "a", index))


def test_a_right_one_is_taken(tmp_path):
    checkpoint = open_checkpoint(written(tmp_path / "a", WHOLE), SHAPE)
    verify(checkpoint)
    assert checkpoint.step == 3 and checkpoint.shape == SHAPE and checkpoint.index.loss_scale == (1024.0, 3)


def put(*place: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = place

    def change(index: dict[str, Any]) -> None:
        for step in way:
            index = index[step]
        index[last] = value

    return change


def fewer(*place: Any) -> Callable[[dict[str, Any]], None]:
    *way, last = place

    def change(index: dict[str, Any]) -> None:
        for step in way:
            index = index[step]
        del index[last]

    return change


FIRST = ("files", 0, "tensors", 0, "parts", 0)
WRONG = [
    put("step", -1), put("step", "3"), put("step", 3.5), put("step", True), put("step", 2**70), fewer("step"),
    put("model", None), put("model", "layers", -1), put("model", "layers", MOST_LAYERS + 1),
    put("model", "vocab_size", MOST_SIZE + 1), put("model", "layers", "1"), put("model", "name", 7),
    put("model", "heads", 3), put("model", "family", "gpt"), put("model", "more", 1), put("plan", []),
    put("precision", "int8"), put("precision", None), put("optimizer", []), put("optimizer", {"beta1_pow_acc": "x"}),
    put("loss_scale", 5), put("loss_scale", [1.0]), put("data", {"samples": -1, "global_batch": 4, "identity": {}}),
    put("data", {"samples": 1, "global_batch": 0, "identity": {}}), put("data", "identity", []), put("files", []),
    put("files", {}), put("files", 0, 5), put("files", 0, "bytes", "800"),
    put("files", 0, "bytes", 12),  # fewer than its tensors
    put("files", 0, "crc32", None), put("files", 0, "tensors", None), put("files", 0, "tensors", 0, "key", "../x"),
    *(put("files", 0, "file", name) for name in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", 3)),
    *(put("files", 0, "file", name) for name in (".safetensors", "index.json", "a\nb.safetensors", "x.safetensors\n")),
    put(*FIRST, "weight", None), put(*FIRST, "shape", []), put(*FIRST, "shape", [4, 0]),
    put(*FIRST, "shape", [10**9, 10**9]),  # nobody has stored so many
    put(*FIRST, "shape", "4"), put(*FIRST, "start", -1), put(*FIRST, "stop", 189),
    put(*FIRST, "stop", 187),  # then one is lacking
    put(*FIRST, "offset", -1), put(*FIRST, "offset", 10**9), put(*FIRST, "slice", None),
    put(*FIRST, "slice", {**WHOLE_SLICE, "axis": 2}), put(*FIRST, "slice", {**WHOLE_SLICE, "axis": 0, "index": 1}),
    put(*FIRST, "slice", {**WHOLE_SLICE, "parts": 0}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_one_is_named_in_one_line(tmp_path, number):
    index = copy.deepcopy(WHOLE)
    WRONG[number](index)
    with pytest.raises(BrokenCheckpoint) as raised:
        open_checkpoint(written(tmp_path / "a", index))
    assert str(raised.value).startswith(f"{tmp_path / 'a' / INDEX}: ") and len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 2}', "\0", '{"format": NaN}', "[" * 100_000])
def test_what_is_no_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(BrokenCheckpoint, match=r"index.json: "):
        open_checkpoint(tmp_path)


def test_another_models_is_no_damage(tmp_path):
    with pytest.raises(UserError, match="is a checkpoint of tiny, whose shape is not that of other"):
        open_checkpoint(written(tmp_path / "a", WHOLE), replace(SHAPE, name="other", vocab_size=9))


def test_a_file_that_is_none_does_not_hang(tmp_path):
    checkpoint = open_checkpoint(written(tmp_path / "a", WHOLE))
    (tmp_path / "a" / FILE).unlink()
    os.mkfifo(tmp_path / "a" / FILE)
    with pytest.raises(BrokenCheckpoint, match="is not a regular file"):
        verify(checkpoint)


def test_the_newest_comes_first_and_what_is_half_written_does_not_count(tmp_path):
    assert whole_checkpoints(tmp_path / "none") == []
    names = ["step-00000002", "step-100000000", "step-00000003", "step-00000003.before", "step-00000004.part"]
    others = ["left-1-step-00000009", "old-1-step-00000009.part", "step-9", ".lock"]
    for name in names + others:
        (tmp_path / name).mkdir()
    order = ["step-100000000", "step-00000003", "step-00000003.before", "step-00000002"]
    assert [path.name for path in whole_checkpoints(tmp_path)] == order


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    (tmp_path / "checkpoints").write_text(json.dumps({}))
    with pytest.raises(UserError, match="checkpoints: cannot be read: Not a directory"):
        whole_checkpoints(tmp_path / "checkpoints")
