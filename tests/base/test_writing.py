"""Whole and durable files and folders: names, modes, strangers' files, renames that a network file system repeats."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paddlenlp_galvatron.base import GalvatronError, UserError
from paddlenlp_galvatron.base.writing import make_folder, move, whole_file, whole_folder, write_text


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """Paths that were brought to disk so far."""
    paths: list[str] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        paths.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "plan.json", "{}")
        with whole_folder(tmp_path / "model") as folder:
            (folder / "weights").write_bytes(b"1")
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("plan.json", "model", "model/weights")}
    assert modes == {"plan.json": 0o640, "model": 0o750, "model/weights": 0o640}


def test_content_names_and_new_folders_are_brought_to_disk(tmp_path, synced):
    write_text(tmp_path / "a" / "b" / "file", "text")
    folders = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert synced[:2] == folders[:2] and synced[2].startswith(f"{folders[2]}/.file.") and synced[3:] == folders[2:]
    synced.clear()
    with whole_folder(tmp_path / "model") as folder:
        (folder / "deeper").mkdir()
        for name in ("one", "deeper/two"):
            (folder / name).write_bytes(b"1")
    assert {path.replace(str(folder), "model") for path in synced[:-1]} == {
        "model/one",
        "model/deeper/two",
        "model/deeper",
        "model",
    }
    assert synced[-1] == str(tmp_path)


def test_what_fails_leaves_nothing_and_what_was_there_stays(tmp_path):
    write_text(tmp_path / "file", "before")
    with pytest.raises(RuntimeError), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "folder") as folder:
        (folder / "half").write_bytes(b"1")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path):
    left, held = tmp_path / ".file.0123abcd.part", tmp_path / ".file.dcba3210.part"
    others = [".file.0123abcd.parts", ".file.0123abcX.part", ".other.0123abcd.part", "file.0123abcd.part"]
    for name in [left.name, held.name, *others]:
        (tmp_path / name).write_text("half")
    (tmp_path / ".file.aaaaaaaa.part").mkdir()
    (tmp_path / ".file.bbbbbbbb.part").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / ".file.cccccccc.part")
    with held.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_text(tmp_path / "file", "text")
        names = {path.name for path in tmp_path.iterdir()}
    parts = {held.name, *(f".file.{letter * 8}.part" for letter in "ab")}
    assert names == {"file", *others, *parts}


def test_writers_of_one_file_take_nothing_from_each_other(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda number: write_text(tmp_path / "file", f"{number}" * 1000), range(400)):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len((tmp_path / "file").read_text()) >= 1000


@pytest.mark.parametrize("path", ["/dev/null", "folder", "n\0ul", "x" * 300])
def test_what_is_no_name_for_a_file_is_refused_and_stays(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(UserError) as raised:
        write_text(path, "text")
    assert len(raised.value.faults) == 1
    assert Path("/dev/null").is_char_device() and [entry.name for entry in Path().iterdir()] == ["folder"]


def test_a_folder_of_which_another_writer_is_at_work_is_refused(tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with whole_folder(tmp_path / "model") as folder:
            inside.set()
            go_on.wait(60)
            (folder / "weights").write_bytes(b"first")

    writer = threading.Thread(target=first)
    writer.start()
    assert inside.wait(60)
    reported = rf"model: is in use by process {os.getpid()} on .* since "
    with pytest.raises(UserError, match=reported), whole_folder(tmp_path / "model"):
        pytest.fail("two at once")
    go_on.set()
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(UserError, match="exists already"), whole_folder(tmp_path / "model"):
        pass


def test_only_what_a_killed_writer_of_the_folder_left_is_removed(tmp_path):
    strangers = ["model.part", ".model.part", ".model.0123.part", ".other.01234567.part", ".model.0123456g.part"]
    for name in [*strangers, ".model.01234567.part"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with whole_folder(tmp_path / "model"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*strangers, "model"}


def test_a_rename_that_was_done_and_reported_failed_is_done(tmp_path, monkeypatch):
    rename = Path.rename

    def twice(self: Path, target: Path) -> None:
        rename(self, target)
        rename(self, target)  # the answer to the first was lost

    monkeypatch.setattr(Path, "rename", twice)
    write_text(tmp_path / "file", "one")
    write_text(tmp_path / "file", "two")
    with whole_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "file").read_text() == "two" and (tmp_path / "model").is_dir()
    monkeypatch.setattr(Path, "rename", lambda self, target: rename(self.with_name("none"), target))
    with pytest.raises(UserError, match="No such file"):
        write_text(tmp_path / "file", "three")
    with pytest.raises(GalvatronError, match="No such file"), whole_folder(tmp_path / "second"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"file", "model"}
    make_folder(tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        move(tmp_path / "none", tmp_path / "file")
