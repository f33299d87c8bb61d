"""The lock of written files: one at a time, ends with its holder, and shared with processes that the holder starts."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paddlenlp_galvatron.base import UserError
from paddlenlp_galvatron.base.writing import LOCK, locked

HOLD = """
import sys
from pathlib import Path
from paddlenlp_galvatron.base.writing import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_who_comes_second_learns_who_holds_it(tmp_path):
    with hold(tmp_path) as holder:
        reported = rf"is in use by process {holder.pid} on \S+ since \d+-.*wait until"
        with pytest.raises(UserError, match=reported), locked(tmp_path):
            pytest.fail("two at once")
        holder.communicate()
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_killed_holder_holds_nothing(tmp_path):
    with hold(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()


def test_what_a_holder_starts_holds_it_too_and_nobody_else(tmp_path):
    with locked(tmp_path):
        with hold(tmp_path) as rank:
            rank.communicate()
        assert rank.returncode == 0
        assert (tmp_path / LOCK).exists()  # the child leaves it to the parent
    with hold(tmp_path) as stranger:
        with pytest.raises(UserError), locked(tmp_path):
            pytest.fail("the mark of a lock that has ended still counts")
        stranger.communicate()


def test_a_writer_waits_for_another(tmp_path):
    with hold(tmp_path) as holder:
        threading.Timer(0.3, holder.terminate).start()
        with locked(tmp_path, wait_s=60):
            pass


def test_a_lock_is_one_at_a_time_though_it_is_removed(tmp_path):
    inside, most = 0, []

    def often() -> None:
        nonlocal inside
        for _ in range(20):
            with locked(tmp_path, wait_s=60):
                inside += 1
                most.append(inside)
                inside -= 1

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80


def test_foreign_text_in_a_lock_file_is_not_repeated(tmp_path):
    (tmp_path / LOCK).write_text("\x1b[31mprocess 1 on a since b, mark c\n" * 1000)
    handle = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is in use by another process;"), locked(tmp_path):
        pytest.fail("taken from a stranger")
    os.close(handle)


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert "its file system has no locks; see that nothing else writes there" in capsys.readouterr().err


def test_what_cannot_be_locked_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none: cannot be locked: .*No such file"), locked(tmp_path / "none"):
        pytest.fail("no folder to lock")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be locked"), locked(tmp_path):
        pytest.fail("a lock elsewhere")
    assert not (tmp_path / "elsewhere").exists()
