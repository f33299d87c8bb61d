"""Profiles that are killed continue where they stopped; a rank that dies ends the others."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from forked_ranks import fork_command
from small_model import GROUPED_MODEL

from paddlenlp_galvatron.measure.journal import FOLDER
from paddlenlp_galvatron.profiles import ComputationProfile, HardwareProfile, MemoryProfile

SIZE = ("fp32", 64, 8)


def known(folder: Path) -> dict[str, object]:
    """The lines of the journals; a line that was cut off does not count."""
    found: dict[str, object] = {}
    for file in (folder / FOLDER).glob("*.jsonl"):
        for line in file.read_text().split("\n")[1:-1]:
            key, value = json.loads(line)
            assert key not in found, f"{key} was measured twice"
            found[key] = value
    return found


def profile_through_kills(words: list[str], folder: Path, stated: Path, kills: int, seed: int) -> None:
    """Run the command, killed at random moments of its measuring `kills` times, to its end."""
    moments = random.Random(seed)
    before: dict[str, object] = {}
    for _ in range(kills):
        process = fork_command(words, stated)
        more = len(before) + moments.randint(1, 6)  # numbers after which it is killed, or at its end
        while process.poll() is None and (not (folder / FOLDER).exists() or len(known(folder)) < more):
            time.sleep(0.02)
        time.sleep(moments.random() / 20)
        assert process.poll() is None, "it ended before it was to be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        after = known(folder)
        assert before.items() <= after.items(), "a number was measured again"
        before = after
    assert fork_command(words, stated).wait(600) == 0, stated.read_text()
    assert before.items() <= known(folder).items()


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GROUPED_MODEL))
    return tmp_path / "config.json"


def model_words(config: Path, nproc: int = 1, lengths: str = "16,32,48", samples: int = 8) -> list[str]:
    words = ["profile", "model", "--model", str(config), "--nproc", str(nproc), "--output", str(config.parent / "out")]
    words += ["--profile_mode", "batch", "--profile_seq_length_list", lengths, "--adaptive", "0"]
    words += ["--profile_max_batch_size", str(samples)]
    return [*words, "--budget_ms", "0", "--max_tp_deg", "2"]


@pytest.mark.parametrize(
    ("kills", "lengths", "samples"), [(1, "16", 2), pytest.param(10, "16,32,48", 8, marks=pytest.mark.slow)]
)
def test_a_model_profile_killed_at_random_continues_where_it_stopped(config, kills, lengths, samples):
    folder = config.parent / "out"
    profile_through_kills(model_words(config, 1, lengths, samples), folder, config.parent / "log", kills, seed=kills)
    times = ComputationProfile.load(folder / "computation_profiling_fp32_hidden_64_head_8.json", *SIZE)
    MemoryProfile.load(folder / "memory_profiling_fp32_hidden_64_head_8.json", *SIZE)
    assert len(times.passes) == 3 * 2 * len(lengths.split(",")) * samples  # parts, degrees, lengths, batch sizes
    assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.name != FOLDER]


@pytest.mark.slow
def test_a_hardware_profile_killed_ten_times_continues_where_it_stopped(tmp_path):
    folder = tmp_path / "out"
    words = ["profile", "hardware", "--nproc", "2", "--output", str(folder), "--end_mb", "1", "--budget_ms", "0"]
    profile_through_kills(words, folder, tmp_path / "printed", 10, seed=1)
    assert HardwareProfile.load(1, 2, folder=folder).p2p_mib_per_ms


def test_a_rank_that_dies_ends_the_launch_with_its_name(config):
    stated = config.parent / "printed"
    process = fork_command(model_words(config, nproc=2), stated)
    while not (ranks := _children(process.pid)):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    begin = time.monotonic()
    os.kill(max(ranks), signal.SIGKILL)
    assert process.wait(600) == 1
    assert time.monotonic() - begin < 300
    assert "rank 1 was ended by signal 9" in stated.read_text()


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed] if len(listed) == 2 else []
