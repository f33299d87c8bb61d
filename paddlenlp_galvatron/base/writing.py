"""Files and folders that are on disk, whole, when a call returns, or not there at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UserError


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all, creating its folder; it lasts through a loss of power. Raises UserError."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        whole = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            whole.chmod(0o644)
            whole.replace(target)
        except BaseException:
            whole.unlink()
            raise
        to_disk(target.parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None


def to_disk(path: Path) -> None:
    """Let a file's content, or the names in a folder, last through a loss of power. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
