"""`kill -9` of any rank at any moment, while a checkpoint is written or not: the run continues, and ends as a straight
one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from forked_ranks import Forked, fork
from small_model import small_config

from paddlenlp_galvatron.launch.nodes import ONE_NODE
from paddlenlp_galvatron.launch.store import STORE, TOKEN_VARIABLE, StoreServer
from paddlenlp_galvatron.plan import Precision, write_plan
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, verify, whole_checkpoints
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.step_log import read_log

from .plans import plan

SAVE_STEPS, SEED = 4, 6
TWO = plan(2, "1z 2", vocab="2", micro_batches=1, batch=2)
AWAY = replace(TWO.assumed, mixed_precision=Precision.BF16, offload_optimizer=True)
PLANS = {  # by name: ZeRO-3 next to tensor parallel layers, in one stage and in two
    "2 ranks": TWO,
    "4 ranks, two stages": plan(4, "1z 2z", (1, 1), vocab="2z", micro_batches=2, batch=4),
    "optimizer in host memory": replace(TWO, assumed=AWAY),
}
MODEL = small_config("qwen2", hidden=64, inner=128, num_key_value_heads=2, vocab=30000, attention_dropout=0.1)
# 46 MiB a checkpoint: writing one takes about as long as a step.
NO_END = 1_000_000  # steps
CONSTANT = {"lr_scheduler_type": "constant", "weight_decay": 0.1}  # a rate that does not depend on how long a run is
START_S = 1.0  # the start before the first step takes about so long
WRITE_S = 0.1  # a kill hits a checkpoint within so long of its beginning
GRACE_S = 5.0  # the launcher's, between asking the other ranks to end and ending them
TIMEOUT_S = 600.0


def records_of(output: Path) -> list[dict]:
    """The log so far."""
    return [*map(dict, read_log(output / "train_log.jsonl"))]


@dataclass
class Runs:
    """Worlds of training workers, started without a launcher."""

    folder: Path
    store: StoreServer | None = None  # at which the ranks of the present world meet

    def start(self, output: str, of: str = "2 ranks", **options: Any) -> Life:
        """`of`: the plan's name."""
        settings, count = self.folder / f"{output}.settings.json", PLANS[of].world_size
        common = {"model": "model.json", "input_dir": "0.7 a 0.3 b", "split": "1,0,0", "seed": SEED}
        common |= {"plan": f"{of}.json", "world_size": count, "output_dir": output} | CONSTANT
        settings.write_text(json.dumps({**common, **options}))
        if self.store:
            self.store.close()
        self.store = ONE_NODE.store("runs")
        assert self.store
        meeting = {STORE: f"{self.store.address}:{self.store.port}", TOKEN_VARIABLE: self.store.token}
        begun, ranks = time.time(), []
        for rank, own in enumerate(ONE_NODE.environment(count)):
            environment = {**os.environ, "PADDLE_DISTRI_BACKEND": "gloo", **own, **meeting}
            words = ["-m", "paddlenlp_galvatron.training.train_worker", str(settings)]
            with chdir(self.folder):
                ranks.append(fork(words, environment, self.folder / f"workerlog.{rank}"))
        return Life(self.folder, self.folder / output, ranks, begun)


@dataclass
class Life:
    """A run from a start to a kill, or to its end."""

    folder: Path
    output: Path
    ranks: list[Forked]
    begun: float

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
            (self.folder / f"workerlog.{rank}").read_text(errors="replace") for rank in range(len(self.ranks))
        )

    def alive(self) -> list[int]:
        return [rank.pid for rank in self.ranks if rank.poll() is None]

    def wait_for_steps(self, first: int, count: int) -> None:
        """Until this life has done so many steps from the first one on."""
        log = self.output / "train_log.jsonl"
        while count and not (log.exists() and log.stat().st_mtime > self.begun and len(self.records) >= first + count):
            self.require_alive()
            time.sleep(0.002)

    def require_alive(self) -> None:
        assert len(self.alive()) == len(self.ranks) and time.time() - self.begun < TIMEOUT_S, self.log

    def stop_while_writing(self, chance: random.Random) -> None:
        """Stop the ranks at some moment in which a checkpoint is being written."""
        while not self.writing:
            self.require_alive()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, WRITE_S))
        self.report(signal.SIGSTOP)
        if not self.writing:
            self.report(signal.SIGCONT)
            self.stop_while_writing(chance)

    def kill(self, rank: int) -> None:
        """Kill a rank, then end the others as the launcher does."""
        self.ranks[rank].kill()
        self.report(signal.SIGCONT)
        time.sleep(0.1)
        reported = self.terminate()
        while alive := self.alive():
            if time.time() - reported > GRACE_S:
                os.kill(alive[0], signal.SIGKILL)
            time.sleep(0.01)

    def terminate(self) -> float:
        self.report(signal.SIGTERM)
        return time.time()

    def report(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)

    def wait(self) -> None:
        while self.alive():
            assert time.time() - self.begun < TIMEOUT_S, self.log
            time.sleep(0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
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
    return Runs(folder)


@pytest.mark.parametrize(
    ("of", "kills"), [("2 ranks", 2), *(pytest.param(of, 50, marks=pytest.mark.slow) for of in PLANS)]
)
def test_kills_at_random_moments_cost_no_more_than_the_save_interval(runs, of, kills, record_property):
    chance, output = random.Random(kills), f"{of}, {kills} kills"
    hits, costs, newest, saved = 0, [], None, 0
    for kill in range(kills):
        life = runs.start(output, of, max_steps=NO_END, save_steps=SAVE_STEPS)
        if kill % 2:
            life.stop_while_writing(chance)
        else:
            life.wait_for_steps(saved, count := chance.randrange(2 * SAVE_STEPS))
            time.sleep(chance.uniform(0, WRITE_S if count else START_S))
            life.report(signal.SIGSTOP)  # until the kill nothing changes, however late this process has its turns
        writing = life.writing
        life.kill(chance.randrange(len(life.ranks)))
        hits += bool(writing)
        if newest is not None and "resuming from" in life.log:
            assert f"resuming from {newest}" in life.log
        whole = whole_checkpoints(life.output / "checkpoints")
        for folder in whole:
            verify(open_checkpoint(folder))
        newest = whole[0].relative_to(runs.folder) if whole else None
        saved = open_checkpoint(whole[0]).step if whole else 0
        done = len(life.records)
        costs.append(done - saved)
        assert costs[-1] <= SAVE_STEPS + (done - max(writing) if writing else 0)
    record_property("kills while a checkpoint was written", hits)
    record_property("steps lost at each kill", costs)
    assert hits >= kills // 2
    last = runs.start(output, of, max_steps=NO_END, save_steps=SAVE_STEPS)
    last.wait_for_steps(saved, 2 * SAVE_STEPS)
    last.terminate()
    last.wait()
    assert not list((last.output / "checkpoints").glob("*.part"))
    straight = runs.start(f"{output}, straight", of, max_steps=len(last.records), save_steps=0)
    straight.wait()
    ended, alone = ([(r["step"], r["loss"], r["grad_norm"]) for r in life.records] for life in (last, straight))
    assert ended == alone
