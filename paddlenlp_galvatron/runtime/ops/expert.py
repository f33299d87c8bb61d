"""Experts under plain tensor parallelism: between layers each rank has all tokens, of which it sends its own part."""

from __future__ import annotations

from typing import Any

from ...plan.comm_points import Op
from ..collectives import all_gather


def _own(x: Any, group: Any) -> Any:
    """This rank's part of tokens that all ranks have."""
    count = x.shape[0] // group.nranks
    return x[group.rank * count : (group.rank + 1) * count].clone()


OPS = {Op.TAKE: (_own, all_gather), Op.GIVE: (all_gather, _own)}
