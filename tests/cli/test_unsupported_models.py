"""Settings that the layers do not compute are refused by every command that takes a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from meanings import WHOLE
from plans import plan_fields

pytest.importorskip("paddle")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "uniform", "--model_size=model", "--world_size=4", "--global_train_batch_size=8"),
        ("plan", "check", "plan.json", "--model=model"),
        ("search", "--model_size=model", "--analytic=h100", "--num_nodes=1", "--num_gpus_per_node=4"),
        ("fit", "model", "--gpus=8", "--device=h100"),
        ("explain", "plan.json", "--model_size=model"),
        ("profile", "computation", "--model_size=model", "--analytic=h100"),
        ("train", "--model_size=model", "--max_steps=1", "--output_dir=out", "--per_device_train_batch_size=1"),
        ("train", "plan.json", "--model=model", "--dry_run", "--output_dir=out"),
        ("convert", "h2g", "model", "out"),
        ("convert", "merge", "model", "model", "out"),
        ("validate", "--model_size=model", "--output=out"),
    ],
    ids=" ".join,
)
def test_every_command_refuses_it_before_it_writes_anything(
    words: tuple[str, ...], galvatron: Any, tmp_path: Path
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(WHOLE["llama"] | {"hidden_act": "relu"}))
    Path("plan.json").write_text(json.dumps(plan_fields()))
    ran = galvatron(*words)
    assert ran.code == 2 and "config.json: hidden_act is relu; silu alone is supported" in ran.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model", "plan.json"]
