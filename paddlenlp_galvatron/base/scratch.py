"""Temporary folders of a command: removed at its end or, if it is killed, by the next command that makes one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

IN_USE = ".in-use"  # a file that is locked as long as its folder's command lives


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder whose name begins so, under the system's folder for such. If the work in it fails, it stays for the
    user to look into. Raises OSError."""
    _remove_left(Path(tempfile.gettempdir()), prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    hidden = folder / f"{IN_USE}.new"
    with hidden.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.rename(folder / IN_USE)  # locked before others can see it
        try:
            yield folder
        except Exception:
            (folder / IN_USE).unlink()
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(parent: Path, prefix: str) -> None:
    for mark in parent.glob(f"{prefix}*/{IN_USE}"):
        with suppress(OSError), mark.open("r+") as file:
            if mark.parent.stat().st_uid == os.geteuid() and not mark.parent.is_symlink():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent, ignore_errors=True)
