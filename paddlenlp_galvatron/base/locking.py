"""One lock for written files: a second writer fails with the holder's name and changes nothing.

The lock is `flock` on a small file, so it ends with its holder however that ends. Processes that a holder starts hold
it, too: a launcher's ranks write the files that the launcher has locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

LOCK = ".lock"
POLL_S = 0.1
MARKS = "GALVATRON_LOCKS"  # environment: marks of the locks that a process and its parents hold
_TAKEN: set[str] = set()  # marks of the locks that this process took itself; MARKS without these are its parents'
HOLDER = re.compile(r"(process \d+ on [\w.-]+ since [\d:. -]+), mark ([0-9a-f]{16})\n")
LONGEST_BYTES = 1000  # of a lock file
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}  # some parallel file systems have none
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def locked(target: Path, *, file: Path | None = None, shared: bool = False, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of `target`, a folder that exists, or, by another lock `file`, anything.

    `shared`: with others that share it, as readers do; in a folder that this process may not write to nobody is kept
    out. `wait_s`: how long others may still hold it. Raises UserError: they do; the lock file cannot be made.
    """
    file = file or target / LOCK
    try:
        handle = _taken(target, file, shared, time.monotonic() + wait_s)
    except OSError as error:
        raise UserError(f"{target}: cannot be locked: {file}: {error.strerror}") from None
    if handle is None:
        yield
        return
    mark = secrets.token_hex(8)
    try:
        if not shared:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(handle, 0)
            os.pwrite(
                handle, f"process {os.getpid()} on {socket.gethostname()} since {since}, mark {mark}\n".encode(), 0
            )
            _TAKEN.add(mark)
            os.environ[MARKS] = f"{os.environ.get(MARKS, '')} {mark}"
        yield
    finally:
        if not shared:
            _TAKEN.discard(mark)
            os.environ[MARKS] = os.environ.get(MARKS, "").replace(f" {mark}", "")
            with suppress(OSError):  # the lock ends all the same
                if is_named(handle, file):  # else the folder was removed, and it may be another's
                    file.unlink()
        os.close(handle)


def _taken(target: Path, file: Path, shared: bool, deadline: float) -> int | None:
    """The open lock file, locked; None where no lock is needed, or there can be none."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if shared and error.errno in NOT_WRITABLE:
                return None
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UserError(f"{file}: is not a regular file; remove it")
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
