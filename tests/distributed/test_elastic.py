"""Under Paddle's launcher: started again by hand, restarted by it, with a node more and a node less."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
    """A folder with plans for one and two ranks, and Paddle's launchers started in it, one a node."""

    def __init__(self, folder: Path, master: str | None):
        self.folder, self._master = folder, master
        self._nodes: list[subprocess.Popen[bytes]] = []
        (folder / "config.json").write_text(json.dumps(MODEL))
        for of in (plan(1, "1 1"), plan(2, "1z 2", vocab="2")):
            sized = replace(of, assumed=replace(of.assumed, seq_length=16))
            write_plan(sized, folder / "configs" / f"galvatron_{of.world_size}.json")

    def start(self, nproc: int, max_steps: int, *options: str) -> subprocess.Popen[bytes]:
        """Start a node."""
        master = ["--master", self._master, "--elastic_level", "1", "--elastic_timeout", "5"] if self._master else []
        name = f"node-{len(self._nodes)}"
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(nproc), "--log_dir", name]
        run = [
            str(SCRIPT),
            "--model_size",
            "config.json",
            "--input_dir",
            "random",
            "--max_steps",
            str(max_steps),
            "--save_steps",
            f"{SAVE_STEPS}",
        ]
        with (self.folder / f"{name}.txt").open("wb") as out:
            node = subprocess.Popen(
                [sys.executable, *launcher, *master, *options, *run, "--output_dir", "output"],
                cwd=self.folder,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",  # etcd3 is older than protobuf 4
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


def ranks_in(records: list[dict]) -> int:
    """Ranks of the newest step."""
    return len(records[-1]["peak_memory_mib"]) if records else 0


@pytest.fixture
def alone(tmp_path) -> Iterator[Job]:
    job = Job(tmp_path, None)
    yield job
    job.end()


@pytest.fixture
def elastic(tmp_path) -> Iterator[Job]:
    etcd = shutil.which("etcd")
    if not etcd or importlib.util.find_spec("etcd3") is None:
        pytest.skip("Paddle's elastic launch needs an etcd server and the Python package etcd3")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    urls = {
        "--listen-client-urls": client,
        "--advertise-client-urls": client,
        "--listen-peer-urls": peer,
        "--initial-advertise-peer-urls": peer,
        "--initial-cluster": f"default={peer}",
    }
    words = [word for pair in urls.items() for word in pair]
    with subprocess.Popen([etcd, "--data-dir", str(tmp_path / "etcd"), *words], stderr=subprocess.DEVNULL) as server:
        job = Job(tmp_path, client.replace("http://", "etcd://"))
        time.sleep(1.0)
        yield job
        job.end()
        server.kill()


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now: etcd needs them as arguments."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def test_started_again_after_a_kill_it_continues(alone):
    node = alone.start(2, 60)
    alone.wait(node, lambda records: len(records) > 25)
    os.kill(ranks_of(node)[1], signal.SIGKILL)
    assert node.wait(TIMEOUT_S) != 0
    done = len(alone.records())
    assert alone.start(2, 60).wait(TIMEOUT_S) == 0
    assert [record["step"] for record in alone.records()] == list(range(1, 61))
    [folder] = [line.split("step-")[1] for line in alone.stated().splitlines() if line.startswith("resuming from")]
    assert 0 <= done - int(folder) <= 2 * SAVE_STEPS


def test_a_stopped_rank_reports_its_launcher(alone):
    node = alone.start(2, NO_END)
    alone.wait(node, lambda records: len(records) > 5)
    os.kill(ranks_of(node)[1], signal.SIGTERM)
    assert node.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert (alone.folder / "output" / "checkpoints" / f"step-{len(alone.records()):08d}").exists()


def test_ranks_and_nodes_come_and_go(elastic):
    nodes = ["--nnodes", "1:2"]
    first = elastic.start(1, NO_END, *nodes)
    elastic.wait(first, lambda records: len(records) > 25)
    second = elastic.start(1, NO_END, *nodes)
    joined = elastic.wait(first, lambda records: ranks_in(records) == 2)
    # Paddle ends the ranks with SIGTERM, upon which they save: no step is lost.
    assert [record["step"] for record in joined] == list(range(1, len(joined) + 1))
    # A rank is killed: Paddle starts both again.
    before = elastic.wait(first, lambda records: len(records) > len(joined) + 25)
    os.kill(ranks_of(second)[0], signal.SIGKILL)
    again = elastic.wait(first, lambda records: len(records) < len(before))
    elastic.wait(first, lambda records: ranks_in(records) == 2 and len(records) > len(before))
    assert len(before) - len(again) <= 2 * SAVE_STEPS
    # A node is lost: the other continues alone, under the plan for one rank.
    kill_node(second)
    elastic.wait(first, lambda records: ranks_in(records) == 1)
    # On SIGTERM the launcher signals its ranks, and they save.
    first.terminate()
    first.wait(TIMEOUT_S)
    records = elastic.records()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert (elastic.folder / "output" / "checkpoints" / f"step-{len(records):08d}").exists()
