"""Trains and saves on a disk that is watched, or fails: see `faulty_disk.c`, which is preloaded."""

import ctypes
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from small_model import small_config

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.base.writing import make_folder
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, write_plan
from paddlenlp_galvatron.training.checkpoint.saving import Writer
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, verify, whole_checkpoints
from paddlenlp_galvatron.training.paddlenlp.trainer import GalvatronTrainer
from paddlenlp_galvatron.training.settings import TrainSettings

from .small_run import Run

ERRORS = ("EIO", "EROFS", "ENOSPC", "EACCES", "ESTALE")
EVERY = -1
MODEL = small_config(layers=1, hidden=16, inner=16, heads=2, vocab=32, length=8)


@contextmanager
def faults(operation: str, part: str, nth: int, error: int, done_first: bool = False) -> Iterator[list[int]]:
    """The list gets how many calls have failed."""
    disk_fault = ctypes.CDLL(None).disk_fault
    disk_fault(operation.encode(), part.encode(), nth, error, done_first)
    hits: list[int] = []
    try:
        yield hits
    finally:
        hits.append(disk_fault(b"", b"", 0, 0, 0))


def runs(folder: Path) -> None:
    """A run; one that goes back a step, so that its checkpoint takes the place of another; one that begins again."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    assumed = Assumptions(seq_length=8)
    write_plan(uniform_plan(layers=1, world_size=1, global_train_batch_size=1, assumed=assumed), folder / "plan.json")
    common = {"plan": folder / "plan.json", "model": str(folder / "model.json"), "world_size": 1, "save_steps": 1}
    common["input_dir"] = "random"
    output = folder / "new" / "output"
    for given in (
        {"max_steps": 4},
        {"max_steps": 4, "resume_from_checkpoint": str(output / "checkpoints" / "step-00000003")},
        {"max_steps": 2, "resume_from_checkpoint": "none"},
    ):
        GalvatronTrainer(TrainSettings.from_values({**common, **given, "output_dir": output})).train()


def saving(folder: Path) -> None:
    """Let each call of a save fail once, with EIO, and the first two with other errors: it says so or saves; files that
    were saved before is whole, and the next succeeds."""
    run, failed = Run(), 0
    checkpoints = folder / "checkpoints"
    writer = Writer(checkpoints, run.engine, 2, run.data)
    run.train(1)
    writer.save(run.optimizer)
    writer.finish()
    for operation in ("create", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        for name in ERRORS:
            nth = 0
            while True:
                nth += 1
                before = whole_checkpoints(checkpoints)[0]
                run.train(1)
                reported = ""
                with faults(operation, str(checkpoints), nth, getattr(errno, name)) as hits:
                    try:
                        writer.save(run.optimizer)
                        writer.finish()
                    except GalvatronError as error:
                        reported = str(error)
                newest = whole_checkpoints(checkpoints)[0]
                verify(open_checkpoint(newest))
                if reported:
                    failed += 1
                    assert "a checkpoint could not be written: " in reported and "\n" not in reported, reported
                    assert os.strerror(getattr(errno, name)) in reported, reported
                    verify(open_checkpoint(before))
                else:
                    assert newest.name == f"step-{run.engine.steps_done:08d}", (operation, name, nth)
                if not hits[0] or (name != "EIO" and nth == 2):
                    break
    writer = Writer(checkpoints, run.engine, 2, run.data)
    run.train(1)
    writer.save(run.optimizer)
    writer.finish()
    assert len(list(checkpoints.iterdir())) == 2, list(checkpoints.iterdir())
    assert failed > 30, failed


def network(folder: Path) -> None:
    """Renames that are done and reported as failed; folders that a silly name keeps from going."""
    run = Run()
    checkpoints = folder / "checkpoints"
    writer = Writer(checkpoints, run.engine, 1, run.data)
    for operation, error, done_first in (("rename", errno.ENOENT, True), ("rmdir", errno.ENOTEMPTY, False)):
        for _ in range(3):
            run.train(1)
            with faults(operation, str(checkpoints), EVERY, error, done_first) as hits:
                writer.save(run.optimizer)
                writer.finish()
            assert [path.name for path in whole_checkpoints(checkpoints)] == [f"step-{run.engine.steps_done:08d}"]
        assert hits[0]
    assert list(checkpoints.glob("old-*.part"))
    Writer(checkpoints, run.engine, 1, run.data)
    assert len(list(checkpoints.iterdir())) == 1


def reading(folder: Path) -> None:
    """An unreadable file of the newest checkpoint makes the one before be taken."""
    run = Run()
    checkpoints = folder / "checkpoints"
    writer = Writer(checkpoints, run.engine, 2, run.data)
    losses = []
    for _ in range(2):
        losses += run.train(1)
        writer.save(run.optimizer)
        writer.finish()
    losses += run.train(1)
    newest = whole_checkpoints(checkpoints)[0]
    for operation in ("open", "read"):
        for file in ("index.json", "rank-00000.safetensors"):
            for name in ERRORS:
                for nth in (EVERY, 1, 2):
                    again = Run()
                    with faults(operation, f"{newest.name}/{file}", nth, getattr(errno, name)) as hits:
                        step = again.resume(checkpoints)
                    assert step == (1 if hits[0] else 2), (operation, file, name, nth)
                    assert hits[0] or nth == 2
                    assert again.train(3 - step) == losses[step:]
    with faults("open", str(checkpoints), EVERY, errno.EACCES):
        try:
            Run().resume(checkpoints)
        except UserError as error:
            assert "Permission denied" in str(error)
        else:
            raise AssertionError("started over next to checkpoints that it could not read")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        folder = Path(os.environ["DISK_ROOT"], name)
        make_folder(folder)
        {work.__name__: work for work in (runs, saving, network, reading)}[name](folder)
