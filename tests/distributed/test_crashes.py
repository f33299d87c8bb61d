"""`kill -9` of any rank at any moment, while a checkpoint is written or not: the run goes on, and ends as a straight
one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.runtime.nodes import ONE_NODE
from paddlenlp_galvatron.runtime.store import STORE, TOKEN_VARIABLE, StoreServer
from paddlenlp_galvatron.training.checkpoint import open_checkpoint, verify, whole_checkpoints
from paddlenlp_galvatron.training.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.tokenizer import train_tokenizer

from .plans import plan

SAVE_STEPS, SEED = 4, 6
PLANS = {  # by name: ZeRO-3 beside tensor parallel layers, in one stage and in two
    "2 ranks": plan(2, "1z 2", vocab="2", micro_batches=1, batch=2),
    "4 ranks, two stages": plan(4, "1z 2z", (1, 1), vocab="2z", micro_batches=2, batch=4),
}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30000,  # 46 MiB a checkpoint: writing one takes about as long as a step
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
}
NO_END = 1_000_000  # steps
CONSTANT = {"lr_scheduler_type": "constant", "weight_decay": 0.1}  # a rate that does not depend on how long a run is
START_S = 0.5  # what comes before the first step takes about so long
WRITE_S = 0.1  # a kill hits a checkpoint within so long of its beginning
GRACE_S = 5.0  # the launcher's, between asking the other ranks to end and ending them
TIMEOUT_S = 120.0


def records_of(output: Path) -> list[dict]:
    """The log so far."""
    path = output / "train_log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass
class Forks:
    """Worlds of training workers, and the process that they are forked from."""

    folder: Path
    process: subprocess.Popen[str]
    store: StoreServer | None = None  # at which the ranks of the present world meet

    def start(self, output: str, of: str = "2 ranks", **options: Any) -> Life:
        """`of`: the plan's name."""
        settings, ranks = self.folder / f"{output}.settings.json", PLANS[of].world_size
        common = {"model": "model.json", "input_dir": "0.7 a 0.3 b", "split": "1,0,0", "seed": SEED}
        common |= {"plan": f"{of}.json", "world_size": ranks, "output_dir": output, "recipe": CONSTANT}
        settings.write_text(json.dumps({**common, **options}))
        if self.store:
            self.store.close()
        self.store = ONE_NODE.store("forks")
        assert self.store
        meeting = {STORE: f"{self.store.address}:{self.store.port}", TOKEN_VARIABLE: self.store.token}
        environments = [environment | meeting for environment in ONE_NODE.environment(ranks)]
        job = {"settings": str(settings), "log": str(self.folder), "ranks": environments}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return Life(self.folder, self.folder / output, json.loads(self.process.stdout.readline()))


@dataclass
class Life:
    """A run from a start to a kill, or to its end."""

    folder: Path
    output: Path
    pids: list[int]
    begun: float = field(default_factory=time.time)

    @property
    def records(self) -> list[dict]:
        return records_of(self.output)

    @property
    def writing(self) -> list[int]:
        """Steps of checkpoints that are being written."""
        return [int(path.name[5:13]) for path in (self.output / "checkpoints").glob("step-*.part")]

    @property
    def log(self) -> str:
        return "\n".join(
            (self.folder / f"workerlog.{rank}").read_text(errors="replace") for rank in range(len(self.pids))
        )

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]

    def wait_for_steps(self, first: int, count: int) -> None:
        """Until this life has done so many steps from the first one on."""
        log = self.output / "train_log.jsonl"
        while count and not (log.exists() and log.stat().st_mtime > self.begun and len(self.records) >= first + count):
            self.require_alive()
            time.sleep(0.002)

    def require_alive(self) -> None:
        assert len(self.alive()) == len(self.pids) and time.time() - self.begun < TIMEOUT_S, self.log

    def wait_until_writing(self, chance: random.Random) -> None:
        """Until some moment in which a checkpoint is being written."""
        while not self.writing:
            self.require_alive()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, WRITE_S))
        if not self.writing:
            self.wait_until_writing(chance)

    def kill(self, rank: int) -> None:
        """Kill a rank, then end the others as the launcher does."""
        os.kill(self.pids[rank], signal.SIGKILL)
        time.sleep(0.1)
        told = self.terminate()
        while alive := self.alive():
            if time.time() - told > GRACE_S:
                os.kill(alive[0], signal.SIGKILL)
            time.sleep(0.01)

    def terminate(self) -> float:
        for pid in self.alive():
            os.kill(pid, signal.SIGTERM)
        return time.time()

    def wait(self) -> None:
        while self.alive():
            assert time.time() - self.begun < TIMEOUT_S, self.log
            time.sleep(0.05)


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("crashes")
    for name, of in PLANS.items():
        write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / f"{name}.json")
    (folder / "model.json").write_text(json.dumps(MODEL))
    tokenizer = train_tokenizer(["some text"], 257)
    for name, factor in (("a", 7), ("b", 5)):
        (folder / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": f"{name} {k * factor % 97} " * 9}) for k in range(50))
        )
        write_dataset(Corpus((folder / f"{name}.jsonl",)), folder / name, tokenizer, 0)
    tests = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{tests}:{tests.parent}", "PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.forking_worker"],
        env=os.environ | environment,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Forks(folder, process)
        assert process.stdin
        process.stdin.close()


def test_twenty_steps_are_ten_and_a_new_process_and_ten(forks):
    forks.start("twenty", max_steps=20, save_steps=0).wait()
    for steps in (10, 20):
        life = forks.start("ten-and-ten", max_steps=steps, save_steps=10)
        life.wait()
        assert len(life.records) == steps, life.log
    assert "step-00000010" in life.log  # where it went on
    twenty, both = (
        [(r["loss"], r["grad_norm"]) for r in records_of(forks.folder / o)] for o in ("twenty", "ten-and-ten")
    )
    assert twenty == both


@pytest.mark.parametrize(
    ("of", "kills"),
    [("2 ranks", 6), *(pytest.param(of, 50, marks=pytest.mark.slow) for of in PLANS)],
)
def test_kills_at_random_moments_cost_no_more_than_the_save_interval(forks, of, kills, record_property):
    chance, output = random.Random(kills), f"{of}, {kills} kills"
    hits, costs, newest, saved = 0, [], None, 0
    for kill in range(kills):
        life = forks.start(output, of, max_steps=NO_END, save_steps=SAVE_STEPS)
        if kill % 2:
            life.wait_until_writing(chance)
        else:
            life.wait_for_steps(saved, count := chance.randrange(2 * SAVE_STEPS))
            time.sleep(chance.uniform(0, WRITE_S if count else START_S))
        writing = life.writing
        life.kill(chance.randrange(len(life.pids)))
        hits += bool(writing)
        if newest is not None and "goes on at" in life.log:
            assert f"goes on at {newest}" in life.log
        whole = whole_checkpoints(life.output / "checkpoints")
        for folder in whole:
            verify(open_checkpoint(folder))
        newest = whole[0].relative_to(forks.folder) if whole else None
        saved = open_checkpoint(whole[0]).step if whole else 0
        done = len(life.records)
        costs.append(done - saved)
        assert costs[-1] <= SAVE_STEPS + (done - max(writing) if writing else 0)
    record_property("kills while a checkpoint was written", hits)
    record_property("steps lost at each kill", costs)
    assert hits >= kills // 2
    last = forks.start(output, of, max_steps=NO_END, save_steps=SAVE_STEPS)
    last.wait_for_steps(saved, 2 * SAVE_STEPS)
    last.terminate()
    last.wait()
    assert not list((last.output / "checkpoints").glob("*.part"))
    straight = forks.start(f"{output}, straight", of, max_steps=len(last.records), save_steps=0)
    straight.wait()
    assert [(r["step"], r["loss"]) for r in last.records] == [(r["step"], r["loss"]) for r in straight.records]
