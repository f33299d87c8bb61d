"""A run that is killed or told to stop goes on where it was, and ends as one that ran straight through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.checkpoint import whole_checkpoints

from .plans import plan

STEPS, SAVE_STEPS = 9, 2
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
}
COMMAND = [sys.executable, "-c", "import sys; from paddlenlp_galvatron.cli.main import main; sys.exit(main())", "train"]
WORKER = b"paddlenlp_galvatron.training.train_worker"
TIMEOUT_S = 120


def start(folder: Path, output: str, *words: str) -> subprocess.Popen[bytes]:
    options = ["--model", "model.json", "--output_dir", output, "--max_steps", str(STEPS), *words]
    with (folder / f"{output}.txt").open("ab") as out:
        return subprocess.Popen([*COMMAND, "plan.json", *options], cwd=folder, stdout=out, stderr=out)


def log(folder: Path, output: str) -> list[dict]:
    path = folder / output / "train_log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(process: subprocess.Popen[bytes], folder: Path, output: str, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any(record["step"] >= step for record in log(folder, output)):
        assert time.monotonic() < deadline and process.poll() is None, (folder / f"{output}.txt").read_text()
        time.sleep(0.02)


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, list[float]]:
    """Folder with plan and model, and the losses of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("resume")
    of = plan(2, "1z 2", vocab="2")
    write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / "plan.json")
    (folder / "model.json").write_text(json.dumps(MODEL))
    assert start(folder, "straight").wait(TIMEOUT_S) == 0, (folder / "straight.txt").read_text()
    return folder, [record["loss"] for record in log(folder, "straight")]


def test_killed_ranks_cost_no_more_than_the_steps_since_the_last_checkpoint(straight):
    folder, losses = straight
    for kill_after, victim in ((3, 1), (5, 0)):
        process = start(folder, "killed", "--save_steps", str(SAVE_STEPS))
        wait_for_step(process, folder, "killed", kill_after)
        os.kill(ranks_of(process)[victim], signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 1
        done = log(folder, "killed")[-1]["step"] + 1
        newest = int(whole_checkpoints(folder / "killed" / "checkpoints")[0].name.removeprefix("step-"))
        # The checkpoint that was being written may be lost as well.
        assert done - newest <= 2 * SAVE_STEPS
    process = start(folder, "killed", "--save_steps", str(SAVE_STEPS))
    assert process.wait(TIMEOUT_S) == 0, (folder / "killed.txt").read_text()
    records = log(folder, "killed")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["loss"] for record in records] == losses
    assert "goes on at " in (folder / "killed.txt").read_text()
    assert not list((folder / "killed" / "checkpoints").glob("*.part"))


def test_a_run_that_is_told_to_stop_saves_first(straight):
    folder, losses = straight
    process = start(folder, "stopped")
    wait_for_step(process, folder, "stopped", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0, (folder / "stopped.txt").read_text()
    done = len(log(folder, "stopped"))
    assert done < STEPS
    assert whole_checkpoints(folder / "stopped" / "checkpoints")[0].name == f"step-{done:08d}"
    assert start(folder, "stopped").wait(TIMEOUT_S) == 0
    assert [record["loss"] for record in log(folder, "stopped")] == losses
