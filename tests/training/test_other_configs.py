"""The weights of a model under other configs: losses are those of transformers; checkpoints can be exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from huggingface_models import FOLDER, TOLERANCE, oracle_of

from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.training.checkpoint.convert import precision_of, to_checkpoint, to_huggingface
from paddlenlp_galvatron.training.checkpoint.loading import weights_from
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint
from paddlenlp_galvatron.training.recipe import Recipe

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
