"""Checkpoints on disks that fail, on network file systems, and through a loss of power at any moment."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.training.checkpoint.stored import BrokenCheckpoint, open_checkpoint, verify, whole_checkpoints
from paddlenlp_galvatron.training.step_log import StepLog, read_log

from .disk_replay import Disk, lay_out, read_journal

SAVED = re.compile(rb"saved \S+/step-(\d+) in .*\n")


def work(folder: Path, shim: Path, *what: str, **environment: str) -> None:
    folder.mkdir()
    preload = {"LD_PRELOAD": str(shim), "DISK_ROOT": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-m", f"{__package__}.disk_worker", *what],
        env=os.environ | preload | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_disk_that_fails_costs_no_checkpoint_that_was_saved(shim, tmp_path):
    work(tmp_path / "disk", shim, "saving", "network", "reading")


def test_after_any_loss_of_power_the_newest_checkpoint_that_was_reported_is_found(shim, tmp_path, record_property):
    """Every prefix of three runs' calls, with unsynced content there, gone, half there, or NULs."""
    disk = tmp_path / "disk"
    work(disk, shim, "runs", DISK_JOURNAL=str(tmp_path / "journal"))
    calls = list(read_journal(tmp_path / "journal"))
    reports = [int(step) for call in calls if call.operation == "say" for step in SAVED.findall(call.data)]
    assert reports == [1, 2, 3, 4, 4, 1, 2]
    assert sum(call.operation == "fsync" for call in calls) > 50
    replayed, seen, chance = Disk(str(disk)), set(), random.Random(0)
    reported = 0
    for call in calls:
        if call.operation == "say":
            reported += len(SAVED.findall(call.data))
            continue
        replayed.apply(call)
        if call.operation == "write" and "train_log" not in call.path:
            continue  # no name has changed
        for tree in (replayed.after_a_kill(), *replayed.after_a_loss_of_power(chance)):
            state = (reported, hash(frozenset(tree.items())))
            if state not in seen:
                seen.add(state)
                copy = tmp_path / "copy"
                copy.mkdir()
                lay_out(tree, copy)
                require_going_on(copy / "runs" / "new" / "output", reports, reported)
                shutil.rmtree(copy)
    record_property("states", len(seen))
    assert len(seen) > 300


def require_going_on(output: Path, reports: list[int], reported: int) -> None:
    step = newest_step(output / "checkpoints")
    before, after = (reports[k] if 0 <= k < len(reports) else None for k in (reported - 1, reported))
    assert step in (before, after), (step, before, after)
    if output.is_dir():
        path, continues_at = output / "train_log.jsonl", step or 0
        log = StepLog(path)
        numbers = dict.fromkeys(("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s"), 1.0)
        log.write({"step": continues_at + 1, "steps": 9, **numbers, "peak_memory_mib": []})  # type: ignore[typeddict-item]
        log.close()
        steps = [record["step"] for record in read_log(path)]
        if reported < 5:  # the third run starts a new log
            assert steps == list(range(1, continues_at + 2))


def newest_step(folder: Path) -> int | None:
    """As `resume` looks for it."""
    found = whole_checkpoints(folder)
    for newest in found:
        try:
            checkpoint = open_checkpoint(newest)
            verify(checkpoint)
        except BrokenCheckpoint:
            continue
        return checkpoint.step
    assert not found, "checkpoints, and none is whole"
    return None
