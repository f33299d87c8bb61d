"""Damaged checkpoints are named and older ones taken; a full disk leaves the ones before whole; other data are
reported."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.launch.faults import WAIT_VARIABLE
from paddlenlp_galvatron.training.checkpoint.saving import Writer
from paddlenlp_galvatron.training.checkpoint.stored import (
    INDEX,
    open_checkpoint,
    verify,
    whole_checkpoints,
    write_index,
)
from paddlenlp_galvatron.training.settings import TrainSettings

from .plans import plan
from .small_run import BATCH, CASE, Run

FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return Run().train(5)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Checkpoints after the steps 1, 2 and 3."""
    run = Run()
    writer = Writer(tmp_path / "checkpoints", run.engine, 3, run.data)
    for _ in range(3):
        run.train(1)
        writer.save(run.optimizer)
    writer.finish()
    return tmp_path / "checkpoints"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["checkpoints", "log", "trace"])
def test_nothing_is_written_through_a_link_in_a_runs_folder(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    settings = TrainSettings(plan=Path("plan"), model="model", world_size=1, output_dir=tmp_path / "run")
    with pytest.raises(UserError, match=f"run/{name}: is a link, through which nothing is written"):
        settings.make_output_dir()


def test_a_part_that_is_a_link_is_removed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "step-00000004.part").symlink_to(tmp_path / "elsewhere")
    run = Run()
    writer = Writer(folder, run.engine, 3, run.data)
    run.train(4)
    writer.save(run.optimizer)
    writer.finish()
    assert not list((tmp_path / "elsewhere").iterdir())
    verify(open_checkpoint(folder / "step-00000004"))


def test_where_the_runs_folder_is_gone_or_anothers_nothing_is_saved(tmp_path):
    """The same for ranks that write no log."""
    run, output = Run(), tmp_path / "run"
    writer = Writer(output / "checkpoints", run.engine, 3, run.data)
    output.rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(GalvatronError, match="run: was removed while this run wrote to it"):
            writer.save(run.optimizer)
        output.mkdir(exist_ok=True)
    assert not list(output.iterdir())


def test_a_part_that_never_comes_is_named(folder, monkeypatch):
    run = Run()
    writer = Writer(folder, run.engine, 3, run.data)
    run.train(4)
    run.engine.plan = plan(2, "1 1")  # whose second rank is not there
    monkeypatch.setenv(WAIT_VARIABLE, "0.2")
    writer.save(run.optimizer)
    with pytest.raises(GalvatronError, match="rank 1 did not write a part within 0 s; the one before is whole"):
        writer.finish()
    assert len(whole_checkpoints(folder)) == 3


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (FILE, flip, "its content is not as written"),
        (FILE, cut, "is it cut off?"),
        (FILE, delete, "is missing"),
        (INDEX, flip, "not"),  # no JSON any more, or its checksum differs
        (INDEX, cut, "is the file cut off?"),
        (INDEX, delete, "no such file"),
    ],
)
def test_the_checkpoint_before_a_damaged_one_serves(folder, losses, capfd, file, damage: Callable[..., None], message):
    newest, middle, _ = whole_checkpoints(folder)
    damage(newest / file)
    run = Run()
    assert run.resume(folder) == 2
    stated = capfd.readouterr().err
    assert str(newest / file) in stated and message in stated and f"resuming from {middle}" in stated
    assert run.train(3) == losses[2:]
    with pytest.raises(UserError, match="name one that is whole"):
        Run().resume(folder, str(newest))


def test_all_files_have_the_mode_that_the_umask_leaves(folder):
    before = os.umask(0)
    os.umask(before)
    files = [file for checkpoint in whole_checkpoints(folder) for file in checkpoint.iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~before} and len(files) == 6


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(folder):
    newest = whole_checkpoints(folder)[0]
    flip(newest / FILE)
    run = Run()
    assert run.resume(folder) == 2
    writer = Writer(folder, run.engine, 3, run.data)
    run.train(1)
    writer.save(run.optimizer)
    writer.finish()
    verify(open_checkpoint(newest))
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in (1, 2, 3)]


def test_a_run_does_not_begin_again_when_every_checkpoint_is_damaged(folder):
    newest, middle, oldest = whole_checkpoints(folder)
    flip(newest / FILE)
    cut(middle / FILE)
    delete(oldest / INDEX)
    with pytest.raises(UserError) as raised:
        Run().resume(folder)
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        str(newest / FILE),
        str(middle / FILE),
        str(oldest / INDEX),
        str(folder),
    ]
    assert "--resume_from_checkpoint none" in lines[-1]
    assert Run().resume(folder, "none") == 0


def test_unfinished_checkpoints_are_no_reason_to_stop(tmp_path):
    (tmp_path / "checkpoints" / "step-00000001.part").mkdir(parents=True)
    assert Run().resume(tmp_path / "checkpoints") == 0


def test_load_is_where_to_go_on_until_the_run_has_a_checkpoint_of_its_own(folder, tmp_path_factory):
    first = whole_checkpoints(folder)[0]
    output = tmp_path_factory.mktemp("output")
    settings = TrainSettings(
        plan=Path("plan"), model="model", world_size=1, output_dir=output, load=first, load_distributed=True
    )
    for unfinished in ("", "checkpoints/step-00000004.part"):
        (output / unfinished).mkdir(parents=True, exist_ok=True)
        assert settings.continue_from == str(first)
    (output / "checkpoints/step-00000004").mkdir()
    assert settings.continue_from == "auto"


@pytest.mark.parametrize("whole", [True, False])
def test_numbers_that_a_checkpoint_lacks_are_named(folder, whole):
    """A whole weight or one number. Its checksums are right, its content is not: a fault of its writer."""
    for oldest in whole_checkpoints(folder):
        index = index_of(oldest)
        parts = index["files"][0]["tensors"][0]["parts"]
        parts[-1]["stop"] -= 1
        part = parts.pop() if whole else parts[-1]
        write_index(oldest, index)
    all_weights = CASE.shape.parameters
    stored = all_weights - math.prod(part["shape"])
    few = f"model: has {all_weights} weights, of which {stored} are stored"
    with pytest.raises(UserError, match=f"{oldest.name}.*: {few if whole else 'lacks numbers of ' + part['weight']}"):
        Run().resume(folder)


def index_of(checkpoint: Path) -> dict[str, Any]:
    """Arguments of `write_index`."""
    content: dict[str, Any] = json.loads((checkpoint / INDEX).read_text())
    del content["crc32"]
    return content


def test_other_data_are_refused_unless_a_checkpoint_is_named(folder, capfd):
    other = Run(seed=1)
    with pytest.raises(UserError, match=r"as its data differ \(seed: 0 -> 1\); give the old data"):
        other.resume(folder)
    assert other.resume(folder, str(whole_checkpoints(folder)[0])) == 3
    assert "the data differ (seed: 0 -> 1) and start from their beginning" in capfd.readouterr().err
    assert other.data.first_sample(3) == 0


def test_another_global_batch_continues_at_the_next_sample(folder, capfd):
    run = Run(batch=2 * BATCH)
    assert run.resume(folder) == 3
    assert [run.data.first_sample(step) for step in (3, 4)] == [3 * BATCH, 5 * BATCH]
    assert f"the global batch was {BATCH}, is {2 * BATCH}; resuming at sample {3 * BATCH}" in capfd.readouterr().err
    # A checkpoint of that run keeps the samples, not the steps.
    assert run.data.position(4)["samples"] == 5 * BATCH


@pytest.fixture
def small_disk(folder, tmp_path_factory) -> Iterator[Path]:
    """A disk with room for one and a half checkpoints."""
    size = sum(file.stat().st_size for file in whole_checkpoints(folder)[0].iterdir())
    disk = tmp_path_factory.mktemp("disk") / "checkpoints"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={3 * size // 2}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk, losses):
    run = Run()
    writer = Writer(small_disk, run.engine, 2, run.data)
    run.train(1)
    writer.save(run.optimizer)
    run.train(1)
    writer.save(run.optimizer)
    with pytest.raises(GalvatronError, match=r"could not be written: .*No space left.*the one before is whole"):
        writer.finish()
    assert list(small_disk.glob("*.part"))
    again = Run()
    assert again.resume(small_disk) == 1
    assert again.train(4) == losses[1:]
    Writer(small_disk, again.engine, 2, again.data)
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
