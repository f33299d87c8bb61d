"""Which checkpoint a path means: itself, or one of the run whose folder it is."""

from __future__ import annotations

from pathlib import Path

from ...base.errors import UserError
from .stored import whole_checkpoints


def checkpoint_of(path: Path, iteration: int | None = None) -> Path:
    """The checkpoint of `iteration` steps, or the newest, where `path` is a run's folder or its checkpoints'; else
    `path` itself. Raises UserError: there is none of so many steps."""
    there = whole_checkpoints(path / "checkpoints") or whole_checkpoints(path)
    if not there and not iteration:  # 0 is Galvatron's word for any
        return path
    if iteration is None:
        return there[0]
    for folder in (*there, path):
        if folder.name[:13] == f"step-{iteration:08d}":
            return folder
    steps = ", ".join(str(int(folder.name[5:13])) for folder in reversed(there))
    known = f"there are {steps}" if there else "it is no run's folder"
    raise UserError(f"load_iteration: {path} has no checkpoint of {iteration} steps: {known}")
