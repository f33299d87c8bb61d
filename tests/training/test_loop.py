"""The training loop without PaddleNLP's Trainer: as `galvatron train` runs it."""

import json
import sys

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.events import Reporters
from paddlenlp_galvatron.training.loop import train
from paddlenlp_galvatron.training.paddlenlp.trainer import GalvatronTrainer

from .test_trainer import records, settings

OF_A_RUN = ("time", "run", "step_time_s", "data_s", "tokens_per_s", "peak_memory_mib")


@pytest.mark.parametrize(
    "given",
    [
        {"save_steps": 3, "logging_steps": 2, "evaluation_strategy": "steps", "eval_steps": 2, "max_evaluate_steps": 1},
        {"save_strategy": "epoch", "evaluation_strategy": "epoch", "max_evaluate_steps": 1},
        {"save_strategy": "no", "evaluation_strategy": "steps", "max_evaluate_steps": 1, "logging_steps": 3},
        {"load_best_model_at_end": True, "do_eval": True, "eval_steps": 1, "save_steps": 1, "max_evaluate_steps": 1},
    ],
    ids=["steps", "epochs", "no checkpoints", "the best"],
)
def test_what_is_due_is_due_as_in_paddlenlps_trainer(tmp_path, given):
    """Losses, evaluations, checkpoints and the weights at the end."""
    found = []
    for name, run in (("own", train), ("guest", lambda settings: GalvatronTrainer(settings).train())):
        chosen = settings(tmp_path, output_dir=tmp_path / name, **given)
        run(chosen)
        lines = [{key: value for key, value in line.items() if key not in OF_A_RUN} for line in records(chosen)]
        index = {path.name: json.loads((path / "index.json").read_text()) for path in chosen.checkpoints.glob("step-*")}
        found.append((lines, sorted(index), (tmp_path / name / "best.json").exists()))
    assert found[0] == found[1] and len(found[0][0]) == 4


def test_logs_go_to_the_programs_that_are_named(tmp_path, monkeypatch):
    """Stand-ins with the interfaces of VisualDL and of Weights & Biases, which cannot be installed here."""
    writer = (
        "class LogWriter:\n"
        "    def __init__(self, logdir): self.file = open('visualdl.txt', 'w')\n"
        "    def add_scalar(self, tag, value, step): print(tag, step, file=self.file)\n"
        "    def flush(self): self.file.flush()\n"
    )
    (tmp_path / "visualdl.py").write_text(writer)
    (tmp_path / "wandb.py").write_text(
        "def init(project, dir, config): return Run()\n"
        "class Run:\n"
        "    def log(self, logs, step): print(sorted(logs), step, file=open('wandb.txt', 'a'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = {"logging_steps": 2, "evaluation_strategy": "steps", "max_evaluate_steps": 1}
    try:
        assert Reporters(settings(tmp_path)).names == ("visualdl",)
        train(settings(tmp_path, report_to="visualdl,wandb", **given))
    finally:
        for name in ("visualdl", "wandb"):
            sys.modules.pop(name, None)
    written = (tmp_path / "visualdl.txt").read_text().splitlines()
    assert {"train/loss 2", "train/loss 4", "train/learning_rate 4", "eval/loss 4"} <= set(written)
    lines = (tmp_path / "wandb.txt").read_text().splitlines()
    assert len(lines) == 4 and "train/loss" in lines[0] and "eval/ppl" in lines[1]


def test_a_program_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(UserError, match="report_to: wandb is not installed"):
        train(settings(tmp_path, report_to="wandb"))
