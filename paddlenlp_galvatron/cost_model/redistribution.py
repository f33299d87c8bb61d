"""What it takes to turn one token layout into another: by the intervals that each rank has and needs."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan.layout import TokenLayout


class Redistribution(NamedTuple):
    """Traffic of one change of layout; all of it stays inside blocks of `span` consecutive ranks."""

    span: int
    most_tokens: int  # that a rank receives
    all_tokens: int  # that all ranks together receive


@lru_cache(maxsize=100_000)
def redistribution(source: TokenLayout, target: TokenLayout, tokens: int) -> Redistribution:
    """Tokens that move when `tokens` of a micro-batch go from one layout to the other (as `plan.layout.moves` does)."""
    if _is_plain(source) and _is_plain(target):
        return Redistribution(1, 0, 0)
    (low, high), (wanted_low, wanted_high) = _intervals(source, tokens), _intervals(target, tokens)
    kept = np.maximum(np.minimum(high, wanted_high) - np.maximum(low, wanted_low), 0)
    received = wanted_high - wanted_low - kept
    return Redistribution(lcm(_block(source), _block(target)), int(received.max()), int(received.sum()))


def _is_plain(layout: TokenLayout) -> bool:
    """Whether rank r holds the r-th of equal slices."""
    return layout.grid.degree == 1 or (layout.sharded and layout.grid.consecutive)


def _block(layout: TokenLayout) -> int:
    """Consecutive ranks within which the layout differs from the plain one."""
    if _is_plain(layout):
        return 1
    return layout.grid.degree if layout.grid.consecutive else layout.grid.size


def _intervals(layout: TokenLayout, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last-plus-one token of every local rank; `TokenLayout.interval` over arrays."""
    grid, ranks = layout.grid, np.arange(layout.grid.size, dtype=np.int64)
    index = ranks % grid.degree if grid.consecutive else ranks // grid.dp
    part = ranks // grid.degree if grid.consecutive else ranks % grid.dp
    parts = grid.dp
    if layout.sharded:
        parts, part = grid.size, part * grid.degree + index
    return part * tokens // parts, (part + 1) * tokens // parts
