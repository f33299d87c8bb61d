"""What it takes to turn one token layout into another: by the intervals that each rank has and needs."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np

from ..plan.layout import TokenLayout


class LayoutTraffic(NamedTuple):
    """Traffic of one change of layout; all of it stays inside blocks of `span` consecutive ranks."""

    span: int
    most_tokens: int  # that a rank receives
    all_tokens: int  # that all ranks together receive


@lru_cache(maxsize=100_000)
def redistribution(source: TokenLayout, target: TokenLayout, tokens: int, samples: int | None = None) -> LayoutTraffic:
    """Tokens that move when `tokens` of a micro-batch, so many samples, go from one layout to the other (as
    `plan.layout.moves` does)."""
    if source == target:
        return LayoutTraffic(1, 0, 0)
    held, wanted = source.intervals(tokens, samples)[:, :, None], target.intervals(tokens, samples)[:, None]
    kept = np.maximum(np.minimum(held[..., 1], wanted[..., 1]) - np.maximum(held[..., 0], wanted[..., 0]), 0)
    received = (wanted[..., 1] - wanted[..., 0]).sum((1, 2)) - kept.sum((1, 2))
    return LayoutTraffic(lcm(_block(source), _block(target)), int(received.max()), int(received.sum()))


def _block(layout: TokenLayout) -> int:
    """Consecutive ranks within which the layout differs from that in which rank r holds the r-th of equal slices."""
    parts, stride, mirrored = layout.cuts[0] if layout.cuts else (1, 1, False)
    return stride if parts * stride == layout.size and not mirrored else layout.size
