"""The plan that training takes when none is named: the newest one in a folder that fits model and cluster."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import UserError
from ..base.reading import read_json
from ..model import ModelShape
from .check import require_model, require_valid
from .file import LARGEST_BYTES, plan_from_dict
from .formats.published import is_strategy

LISTED = 10  # files that an error names, the newest


def newest_plan(
    folder: str | Path, shape: ModelShape, world_size: int, task: str = "pretrain", adapts: bool = False
) -> Path:
    """The strategy file that was written last among those of a folder that fit; other JSON files are passed over.

    Raises UserError where none fits, with the reason of each.
    """
    misfits: list[str] = []
    for path in sorted(Path(folder).glob("*.json"), key=lambda file: (-file.stat().st_mtime_ns, file.name)):
        try:
            if _fits(path, shape, world_size, task, adapts):
                return path
        except UserError as error:
            misfits.append(f"{path}: {error.faults[0].removeprefix(f'{path}: ')}")
    headline = f"{folder}: no plan fits {shape.name} on {world_size} ranks; run galvatron search, or name a plan"
    older = [f"{folder}: {len(misfits) - LISTED} older files fit no better"] if len(misfits) > LISTED else []
    raise UserError([headline, *misfits[:LISTED], *older])


def _fits(path: Path, shape: ModelShape, world_size: int, task: str, adapts: bool) -> bool:
    """Whether a file is a plan at all. Raises UserError for one that does not fit."""
    fields = read_json(path, LARGEST_BYTES, comments=True)
    if not isinstance(fields, dict) or not is_strategy(fields):
        return False
    plan = plan_from_dict(fields, world_size, source=str(path))
    require_model(plan, shape, task, adapts)
    require_valid(plan, shape)
    return True
