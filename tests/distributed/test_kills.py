"""`kill -9` of a rank while a checkpoint is written, each life under another plan: nothing is lost, the losses are
those of a straight run, and the health line is printed in every life."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from forked_ranks import Forked, fork_command

from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, step_of, verify, whole_checkpoints
from paddlenlp_galvatron.training.step_log import read_log

from .plans import plan

SAVE_STEPS, NO_END, TIMEOUT_S = 2, 1_000_000, 500.0
WRITE_S = 0.1  # a kill hits a checkpoint within so long of its beginning
INTERLEAVED = "interleaved, ZeRO-3, cp"
PLANS = {
    INTERLEAVED: plan(4, "1c2zn 1c2z 1z 1c2za", (1, 1, 1, 1), vocab="1c2z", chunks=2, batch=4),
    "one stage": plan(2, "1z 2 2u 1z", vocab="2", batch=4),
    "two stages": plan(4, "1z 2z 1z 2zr", (2, 2), batch=4),
    "one rank": plan(1, "1 1 1 1", batch=4),
    "cp": plan(2, "1c2 1c2z 1 1c2", batch=4),
}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30000,  # 46 MiB a checkpoint: writing one takes about as long as a step
    "max_position_embeddings": 16,
}
LIVES: list[Forked] = []
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ended():
    yield
    while LIVES:
        LIVES.pop().kill()  # its ranks go with it


class Life:
    """A `galvatron train` from its start to a kill, or to its end."""

    def __init__(self, folder: Path, name: str, output: str, steps: int):
        words = ["train", f"{name}.json", "--model", "model.json", "--output_dir", output, "--max_steps", str(steps)]
        words += ["--input_dir", "random"]
        words += ["--save_steps", str(SAVE_STEPS), "--logging_steps", "1", "--lr_scheduler_type", "constant"]
        self.output, self.stated = folder / output, folder / f"{output}.txt"
        self.process = fork_command(words, self.stated, folder)
        LIVES.append(self.process)

    def records(self) -> list[dict]:
        return [*map(dict, read_log(self.output / "train_log.jsonl"))]

    def wait_for_writing(self, behind: int) -> int:
        """Wait until the health line was printed and a checkpoint of a later step is being written; gives its step."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if re.search(r"^step \d+/\d+, loss", self.stated.read_text(), re.M):  # leftovers are gone by then
                parts = [int(path.name[5:13]) for path in (self.output / "checkpoints").glob("step-*.part")]
                if begun := [step for step in parts if step > behind]:
                    return max(begun)
            assert self.process.poll() is None and time.monotonic() < deadline, self.stated.read_text()
            time.sleep(0.002)

    def kill_rank(self, chance: random.Random) -> None:
        ranks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        with suppress(ProcessLookupError):
            os.kill(int(chance.choice(ranks)), signal.SIGKILL)
        assert self.process.wait(TIMEOUT_S) == 1, self.stated.read_text()


@pytest.mark.parametrize("seed", [0, 1])
def test_ten_kills_under_changing_plans_lose_nothing(tmp_path, seed, record_property):
    for name, of in PLANS.items():
        write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), tmp_path / f"{name}.json")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    chance, newest, costs = random.Random(seed), 0, []
    others = [name for name in PLANS if name != INTERLEAVED]
    for kill in range(10):
        life = Life(tmp_path, chance.choice(others) if kill % 2 else INTERLEAVED, "run", NO_END)
        # In every second life or so after a checkpoint that becomes whole, however long one takes.
        step = life.wait_for_writing(newest + SAVE_STEPS * chance.randrange(2))
        time.sleep(chance.uniform(0, WRITE_S))
        life.kill_rank(chance)
        stated = life.stated.read_text()
        assert ("resuming from" in stated) == (newest > 0) and (not newest or f"step-{newest:08d}" in stated)
        assert "unexpected" not in stated
        whole = whole_checkpoints(life.output / "checkpoints")
        for folder in whole:
            verify(open_checkpoint(folder))
        newest = step_of(whole[0]) if whole else 0
        costs.append(len(life.records()) - newest)
        assert newest >= step - SAVE_STEPS and costs[-1] <= 2 * SAVE_STEPS
    last = Life(tmp_path, "one stage", "run", newest + 3)
    assert last.process.wait(TIMEOUT_S) == 0, last.stated.read_text()
    assert not list((last.output / "checkpoints").glob("*.part"))
    straight = Life(tmp_path, "one rank", "straight", newest + 3)
    assert straight.process.wait(TIMEOUT_S) == 0, straight.stated.read_text()
    reported, alone = last.records(), straight.records()
    assert [record["step"] for record in reported] == list(range(1, newest + 4))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in reported] == pytest.approx([record[key] for record in alone], rel=1e-5)
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(reported, alone, strict=True)]
    record_property("steps lost at each kill", costs)
    record_property("largest difference of the loss", max(differences))
