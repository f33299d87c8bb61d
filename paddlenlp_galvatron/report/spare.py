"""The answer of `galvatron plan spare`: what each lost node costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..base.printing import table
from ..planner.spare import Spare
from .fit import in_words


def summary(spares: Sequence[Spare]) -> dict[str, Any]:
    """For programs."""
    names = ("nodes", "gpus", "samples_per_s", "lost", "lost_per_gpu", "why_not")
    return {"spares": [{name: getattr(one, name) for name in names} for one in spares]}


def lines(spares: Sequence[Spare], batch: int, folder: Path) -> Iterator[str | Table]:
    """A row for each number of nodes, and how a run takes the plans."""
    shown = table("nodes", "GPUs", "samples/s", "lost", "lost a GPU", "plan", left=("plan",))
    for one in spares:
        speed = (f"{one.samples_per_s:.4g}", f"{one.lost:.1%}", f"{one.lost_per_gpu:.1%}") if one.best else ("-",) * 3
        shown.add_row(str(one.nodes), str(one.gpus), *speed, in_words(one.best.plan) if one.best else one.why_not)
    yield shown
    yield f"global batch {batch} kept; written: {folder}; galvatron train --spare {folder} takes the plan that fits"
