"""A run that is killed or stopped continues where it was, and ends as one that ran straight through."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from forked_ranks import begun_with, fork_command, forking_command
from small_model import small_config

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, verify, whole_checkpoints
from paddlenlp_galvatron.training.step_log import event_of, read_log

from .plans import plan

STEPS, SAVE_STEPS, NO_END = 9, 2, 1_000_000
CONSTANT = ("--lr_scheduler_type", "constant")  # a rate that does not depend on how long a run is
MODEL = small_config("qwen2", num_key_value_heads=2, attention_dropout=0.1)
TIMEOUT_S = 600.0


def words_of(output: str, steps: int = STEPS) -> list[str]:
    words = ["train", "plan.json", "--model", "model.json", "--input_dir", "random", "--output_dir", output]
    return [*words, "--max_steps", str(steps), *CONSTANT]


def heed_hang_ups() -> None:
    """A test run behind `nohup` passes an ignored SIGHUP on to all that it starts."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(folder: Path, output: str, *words: str, steps: int = STEPS, **environment: str) -> Any:
    """A run in a process group of its own; started where the system reads its environment."""
    words = (*words_of(output, steps), *words)
    if not environment:
        return fork_command(words, folder / f"{output}.txt", folder)
    with (folder / f"{output}.txt").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *forking_command(*words)],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=begun_with() | environment,
            start_new_session=True,
            preexec_fn=heed_hang_ups,
        )


def log(folder: Path, output: str) -> list[dict]:
    return [*map(dict, read_log(folder / output / "train_log.jsonl"))]


def events_of(folder: Path, output: str) -> list[dict]:
    lines = (folder / output / "train_log.jsonl").read_bytes().splitlines(keepends=True)
    return [event for line in lines if (event := event_of(line))]


def wait_for_step(process: Any, folder: Path, output: str, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any(record["step"] >= step for record in log(folder, output)):
        assert time.monotonic() < deadline and process.poll() is None, (folder / f"{output}.txt").read_text()
        time.sleep(0.02)


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, list[float]]:
    """Folder with plan and model, and the losses of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("resume")
    of = plan(2, "1z 2", vocab="2")
    write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / "plan.json")
    (folder / "model.json").write_text(json.dumps(MODEL))
    with chdir(folder):
        assert main(words_of("straight")) == 0
    return folder, [record["loss"] for record in log(folder, "straight")]


@pytest.mark.slow
def test_killed_ranks_cost_no_more_than_the_steps_since_the_last_checkpoint(straight):
    folder, losses = straight
    for kill_after, victim in ((3, 1), (5, 0)):
        process = start(folder, "killed", "--save_steps", str(SAVE_STEPS))
        wait_for_step(process, folder, "killed", kill_after)
        os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 1
        done = log(folder, "killed")[-1]["step"]
        newest = int(whole_checkpoints(folder / "killed" / "checkpoints")[0].name.removeprefix("step-"))
        # The checkpoint that was being written may be lost as well.
        assert done - newest <= 2 * SAVE_STEPS
    process = start(folder, "killed", "--save_steps", str(SAVE_STEPS))
    assert process.wait(TIMEOUT_S) == 0, (folder / "killed.txt").read_text()
    records = log(folder, "killed")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in records] == losses
    assert "resuming from " in (folder / "killed.txt").read_text()
    events = events_of(folder, "killed")
    kinds = [event["event"] for event in events if event["event"] != "saved"]
    assert kinds == ["started", "failed", "resumed", "failed", "resumed", "done"]
    assert all("was ended by signal 9" in event["text"] for event in events if event["event"] == "failed")
    assert all(event["lost_steps"] <= 2 * SAVE_STEPS for event in events if event["event"] == "resumed")
    assert len({event["run"] for event in events}) == 3
    assert not list((folder / "killed" / "checkpoints").glob("*.part"))


def test_a_resumed_run_names_each_number_of_the_recipe_that_differs(straight):
    folder, _ = straight
    words = ["train", "plan.json", "--model", "model.json", "--input_dir", "random", "--output_dir", "recipe"]
    first = ["--max_steps", "2", "--learning_rate", "1e-3", "--lr_scheduler_type", "cosine", "--adam_beta2", "0.95"]
    second = ["--max_steps", "3", "--learning_rate", "1e-4", "--max_grad_norm", "2", "--weight_decay", "0.1"]
    for more in (first, second):
        (folder / "recipe.txt").write_text("")
        assert fork_command([*words, *more], folder / "recipe.txt", folder).wait(TIMEOUT_S) == 0
    stated = (folder / "recipe.txt").read_text()
    changed = {
        "max_steps": [2, 3], "learning_rate": [1e-3, 1e-4], "lr_scheduler_type": ["cosine", "linear"],
        "decay_steps": [2, 3], "weight_decay": [0.0, 0.1], "adam_beta2": [0.95, 0.999], "max_grad_norm": [1.0, 2.0],
    }  # fmt: skip
    (resumed,) = (event for event in events_of(folder, "recipe") if event["event"] == "resumed")
    assert resumed["changed"] == changed
    assert all(f"{name}: {was} -> {now}" in " ".join(stated.split()) for name, (was, now) in changed.items())


def stop(
    folder: Path, output: str, shim: Path, first: Callable[[int], None], again: Callable[[int], None], code: int
) -> int:
    """Stop a run, and signal it again and again while it writes its last checkpoint to a slow disk. Gives the steps
    that it has done. Nobody else gets its folder meanwhile."""
    slow = {"LD_PRELOAD": str(shim), "DISK_ROOT": str(folder / output / "checkpoints"), "DISK_SYNC_MS": "300"}
    process = start(folder, output, "--save_steps", "0", steps=NO_END, **slow)
    try:
        wait_for_step(process, folder, output, 2)
        with chdir(folder), redirect_stderr(StringIO()) as reported:
            assert main(words_of(output)) == 2
        assert f"{output}: is in use by process {process.pid} on " in reported.getvalue()
        first(process.pid)
        deadline = time.monotonic() + TIMEOUT_S
        while not list((folder / output / "checkpoints").glob("step-*.part")):
            assert time.monotonic() < deadline and process.poll() is None, (folder / f"{output}.txt").read_text()
            time.sleep(0.01)
        for _ in range(3):
            again(process.pid)
            time.sleep(0.2)
        assert process.wait(TIMEOUT_S) == code, (folder / f"{output}.txt").read_text()
    finally:
        process.kill()
    stated = " ".join((folder / f"{output}.txt").read_text().split())
    assert "error: " not in stated
    assert f"stopped at step {len(log(folder, output))} of {NO_END}; the same command resumes" in stated
    assert not list((folder / output / "checkpoints").glob("*.part"))
    return len(log(folder, output))


def terminate_all(pid: int) -> None:
    """As a scheduler does."""
    for rank in (*ranks_of(pid), pid):
        os.kill(rank, signal.SIGTERM)


@pytest.mark.parametrize(
    ("report", "number"),
    [
        (os.kill, signal.SIGINT),  # to the launcher alone, which sends SIGTERM to the ranks
        pytest.param(os.kill, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(os.killpg, signal.SIGINT, marks=pytest.mark.slow),  # as a terminal does
        (os.killpg, signal.SIGHUP),  # as a terminal that is closed does
    ],
    ids=["interrupted", "terminated", "interrupted by a terminal", "hung up"],
)
def test_a_run_that_is_asked_to_stop_saves_first_however_often_it_is_asked(straight, shim, report, number):
    folder, losses = straight
    output = f"report-{report.__name__}-{number.name}"
    done = stop(folder, output, shim, lambda pid: report(pid, number), terminate_all, 128 + number)
    assert done < NO_END
    assert whole_checkpoints(folder / output / "checkpoints")[0].name == f"step-{done:08d}"
    verify(open_checkpoint(whole_checkpoints(folder / output / "checkpoints")[0]))
    assert [record["loss"] for record in log(folder, output)][:STEPS] == losses[:done]


def test_neither_an_ignored_signal_nor_a_closed_output_ends_a_run(straight):
    """As behind nohup and &, with `| head`."""
    folder, losses = straight

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    words = forking_command(*words_of("kept on"), "--logging_steps", "1")
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=begun_with(),
        start_new_session=True,
        preexec_fn=ignore,
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        try:
            (folder / "kept on.txt").write_text("")
            wait_for_step(process, folder, "kept on", 1)
            for number in (signal.SIGINT, signal.SIGHUP):
                os.killpg(process.pid, number)
            assert (process.wait(TIMEOUT_S), process.stderr.read()) == (0, b"")
        finally:
            process.kill()
    assert [record["loss"] for record in log(folder, "kept on")] == losses


def test_a_run_whose_folder_is_gone_ends_and_makes_no_other(straight):
    folder, _ = straight
    process = start(folder, "gone", "--save_steps", "1", steps=NO_END)
    try:
        wait_for_step(process, folder, "gone", 1)
        (folder / "gone").rename(folder / "elsewhere")
        assert process.wait(TIMEOUT_S) == 1
    finally:
        process.kill()
    reported = (folder / "gone.txt").read_text()
    assert re.search(r"error: \S*gone\S* was removed while this run wrote", " ".join(reported.split())), reported
    assert not (folder / "gone").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(straight, shim):
    folder, _ = straight
    slow = {"LD_PRELOAD": str(shim), "DISK_ROOT": str(folder / "twice" / "checkpoints"), "DISK_SYNC_MS": "60000"}
    process = start(folder, "twice", "--save_steps", "0", steps=NO_END, **slow)
    try:
        wait_for_step(process, folder, "twice", 2)
        ranks = ranks_of(process.pid)
        os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + TIMEOUT_S
        while not list((folder / "twice" / "checkpoints").glob("step-*.part")):
            assert time.monotonic() < deadline and process.poll() is None, (folder / "twice.txt").read_text()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(55) == 130  # a disk that is waited for takes a minute
    finally:
        process.kill()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not whole_checkpoints(folder / "twice" / "checkpoints")
