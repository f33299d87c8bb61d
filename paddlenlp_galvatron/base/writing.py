"""Writes files and folders atomically: whole on disk when a call returns, or absent. Also makes temporary folders.

A file has a hidden name, `.NAME.xxxxxxxx.part`, until its content is on disk; then it is renamed and its folder is
synced. Modes follow the umask. The next writer of a name removes the unfinished file of a killed writer; a live writer
holds a lock on its file.

One lock for written files: a second writer fails with the holder's name and changes nothing. It is `flock` on a small
file, so it is released when the holder dies. Child processes share it: a launcher's ranks write the files that the
launcher has locked.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from .errors import GalvatronError, UserError, reported

LOCK = ".lock"
POLL_S = 0.1
MARKS = "GALVATRON_LOCKS"  # environment: marks of the locks that a process and its parents hold
_TAKEN: set[str] = set()  # marks of the locks that this process took itself; MARKS without these are its parents'
HOLDER = re.compile(r"(process \d+ on [\w.-]+ since [\d:. -]+), mark ([0-9a-f]{16})\n")
LONGEST_BYTES = 1000  # size of a lock file
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}  # some parallel file systems have none


@contextmanager
def locked(target: Path, *, file: Path | None = None, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of `target`: an existing folder, or anything with a separate lock `file`.

    `wait_s`: how long to wait for another holder. Raises UserError if it is still held or the lock file cannot be made.
    """
    file = file or target / LOCK
    with reported(f"{target}: cannot be locked: {file}"):
        handle = _taken(target, file, time.monotonic() + wait_s)
    if handle is None:
        yield
        return
    mark = secrets.token_hex(8)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}, mark {mark}\n".encode(), 0)
        _TAKEN.add(mark)
        os.environ[MARKS] = f"{os.environ.get(MARKS, '')} {mark}"
        yield
    finally:
        _TAKEN.discard(mark)
        os.environ[MARKS] = os.environ.get(MARKS, "").replace(f" {mark}", "")
        with suppress(OSError):  # closing releases the lock
            if is_named(handle, file):  # a new file may belong to another process
                file.unlink()
        os.close(handle)


def _taken(target: Path, file: Path, deadline: float) -> int | None:
    """The open lock file, locked; None where no lock is needed or possible."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UserError(f"{file}: is not a regular file; remove it")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_named(handle, file):
                return handle
            os.close(handle)  # its holder has just removed it
            continue
        except BlockingIOError:
            holder = HOLDER.fullmatch(os.pread(handle, LONGEST_BYTES, 0).decode(errors="replace"))
            os.close(handle)
        except OSError as error:
            os.close(handle)
            if error.errno not in NO_LOCKS:
                raise
            sys.stderr.write(f"note: {target}: its file system has no locks; see that nothing else writes there\n")
            return None
        if holder and holder[2] in set(os.environ.get(MARKS, "").split()) - _TAKEN:
            return None
        if time.monotonic() >= deadline:
            who = holder[1] if holder else "another process"
            raise UserError(f"{target}: is in use by {who}; wait until it ends, or name another folder")
        time.sleep(POLL_S)


def is_named(handle: int, file: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


UNFINISHED = ".part"
MOST_ENTRIES = 10_000  # entries of a folder that are searched for unfinished files
FULL = {errno.ENOSPC, errno.EDQUOT}
UNSYNCED = {errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES}  # a folder that cannot be synced, or not read


def write_text(path: str | Path, text: str) -> None:
    """Write a file atomically, creating its folder; it survives a power failure. Raises UserError."""
    content = text.encode()
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name at the end and is removed on failure. Raises UserError."""
    target = Path(path)
    if "\0" in str(target):
        raise UserError(f"{str(target)!a}: is no name of a file: it has a NUL")
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise UserError(f"{target}: cannot be written: it is not a regular file")
        make_folder(target.parent)
        _remove_left_files(target)
        unfinished, file = _new_file(target)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                move(unfinished, target)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {reason_of(error)}") from None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name at the end and is removed on failure. Raises UserError: the name is
    taken, or another process is writing it; GalvatronError: it cannot be written."""
    target = path.absolute()
    require_absent(target)
    try:
        make_folder(target.parent)
        with locked(target, file=target.with_name(f".{target.name}.lock")):
            require_absent(target)
            for left in _unfinished_of(target):  # the lock's holder is the only living writer
                shutil.rmtree(left, ignore_errors=True)
            unfinished = _unfinished(target)
            try:
                unfinished.mkdir()
                yield unfinished
                tree_to_disk(unfinished)
                move(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise GalvatronError(f"{target}: cannot be written: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Why a write failed, with the remedy for a full disk."""
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "; free space on that disk, or name a folder on another one"
    return reason + (remedy if getattr(error, "errno", None) in FULL else "")


def make_folder(path: Path) -> None:
    """Make a folder and its parents; their names survive a power failure. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        to_disk(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within a folder; the name survives a power failure. Raises OSError."""
    moved = source.stat()
    try:
        source.rename(target)
    except OSError:  # a network file system may repeat a call that has already succeeded
        if not (target.exists() and os.path.samestat(moved, target.stat())):
            raise
    to_disk(target.parent)


def to_disk(path: Path) -> None:
    """Sync a file's content or the names in a folder, so that they survive a power failure. Raises OSError."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (error.errno in UNSYNCED and path.is_dir()):
            raise


def tree_to_disk(folder: Path) -> None:
    """Flush everything in a folder to the disk. Raises OSError."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            to_disk(Path(path, name))
        to_disk(Path(path))


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{UNFINISHED}")


def _unfinished_of(target: Path) -> list[Path]:
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{8}" + re.escape(UNFINISHED))
    with os.scandir(target.parent) as entries:
        return [Path(entry.path) for entry in islice(entries, MOST_ENTRIES) if name.fullmatch(entry.name)]


def _new_file(target: Path) -> tuple[Path, BinaryIO]:
    """Open a file and lock it where the file system has locks, so that no other writer removes it as unfinished. Raises
    OSError."""
    while True:
        unfinished = _unfinished(target)
        file = unfinished.open("xb")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # another process may have removed the unlocked file
            unfinished.stat()
            return unfinished, file
        file.close()


def _remove_left_files(target: Path) -> None:
    """Unlocked files left by killed writers of this name. Raises OSError."""
    for unfinished in _unfinished_of(target):
        with suppress(OSError):  # locked, removed, not a file, or on a file system without locks
            handle = os.open(unfinished, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unfinished.unlink()
            finally:
                os.close(handle)


def require_absent(target: Path) -> None:
    """Raise UserError where there is a file or folder of this name."""
    if os.path.lexists(target):
        raise UserError(f"{target}: exists already; remove it or name another folder")


IN_USE = ".in-use"  # file that is locked while the command that made its folder runs


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder with this prefix in the system's temporary folder. It is kept for the user if the work in it fails.
    Raises OSError."""
    _remove_left(Path(tempfile.gettempdir()), prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    hidden = folder / f"{IN_USE}.new"
    with hidden.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.rename(folder / IN_USE)  # locked before other processes can see it
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
