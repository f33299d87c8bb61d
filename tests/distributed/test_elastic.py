"""Under Paddle's launcher: started again after a kill, and stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.step_log import read_log

from .plans import plan

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "llm/auto_parallel/galvatron/run_pretrain_galvatron.py"
SAVE_STEPS = 10
NO_END = 1_000_000  # steps
TIMEOUT_S = 600.0
MODEL = small_config("qwen2", hidden=64, inner=128, num_key_value_heads=2, vocab=30000)
pytestmark = pytest.mark.slow


class Job:
    """A folder with a plan, and Paddle's launchers started in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        (folder / "config.json").write_text(json.dumps(MODEL))
        of = plan(2, "1z 2", vocab="2")
        write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / "configs" / "galvatron_2.json")

    def start(self, max_steps: int) -> subprocess.Popen[bytes]:
        """Two ranks."""
        name = f"node-{len(self._nodes)}"
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", name]
        run = f"--model_size config.json --input_dir random --max_steps {max_steps} --save_steps {SAVE_STEPS}".split()
        with (self.folder / f"{name}.txt").open("wb") as out:
            node = subprocess.Popen(
                [sys.executable, *launcher, str(SCRIPT), *run, "--output_dir", "output"],
                cwd=self.folder,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                    "OMP_NUM_THREADS": "1",
                },
            )
        self._nodes.append(node)
        return node

    def records(self) -> list[dict]:
        return [*map(dict, read_log(self.folder / "output" / "train_log.jsonl"))]

    def wait(self, node: subprocess.Popen[bytes], reached: Callable[[list[dict]], bool]) -> list[dict]:
        """Until the log is as wanted; returns it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not reached(records := self.records()):
            assert time.monotonic() < deadline and node.poll() is None, self.stated()
            time.sleep(0.02)
        return records

    def stated(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("node-*.txt")))

    def end(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                kill_node(node)


def ranks_of(node: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    return [int(pid) for pid in children if SCRIPT.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def kill_node(node: subprocess.Popen[bytes]) -> None:
    ranks = ranks_of(node)
    node.kill()
    node.wait()
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.fixture
def alone(tmp_path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


def test_started_again_after_a_kill_it_continues(alone):
    node = alone.start(60)
    alone.wait(node, lambda records: len(records) > 25)
    os.kill(ranks_of(node)[1], signal.SIGKILL)
    assert node.wait(TIMEOUT_S) != 0
    done = len(alone.records())
    assert alone.start(60).wait(TIMEOUT_S) == 0
    assert [record["step"] for record in alone.records()] == list(range(1, 61))
    [folder] = [line.split("step-")[1] for line in alone.stated().splitlines() if line.startswith("resuming from")]
    assert 0 <= done - int(folder) <= 2 * SAVE_STEPS


def test_a_stopped_rank_reports_its_launcher(alone):
    node = alone.start(NO_END)
    alone.wait(node, lambda records: len(records) > 5)
    os.kill(ranks_of(node)[1], signal.SIGTERM)
    assert node.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert (alone.folder / "output" / "checkpoints" / f"step-{len(alone.records()):08d}").exists()
