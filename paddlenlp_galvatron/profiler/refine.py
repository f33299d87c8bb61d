"""Which points of a curve are worth measuring, and which measured ones cannot be.

A curve is measured time (ms) over size. Between its points the search interpolates, so a point that its neighbours
already tell need not be measured, and one that they do not tell needs neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..profiles.curves import Curve
from .stopwatch import Timing

Points = Mapping[float, float]


def coarse(grid: Sequence[float]) -> list[float]:
    """Points to begin with: the first of a rising grid, and every second one back from the last."""
    return sorted({*grid[:1], *grid[::-2]})


def misses(points: Points) -> dict[float, float]:
    """How far a curve through all other points misses each inner point, relative to it (leave one out)."""
    sizes = sorted(points)
    return {
        size: abs(Curve.through((x, points[x]) for x in sizes if x != size)(size) / points[size] - 1)
        for size in sizes[1:-1]
    }


def uncertain(grid: Sequence[float], points: Points, tolerance: float) -> list[float]:
    """Points of the grid not measured yet that lie next to one which is missed by more than the tolerance."""
    missed = {size for size, error in misses(points).items() if error > tolerance}
    doubtful = [(low, high) for low, high in pairwise(sorted(points)) if {low, high} & missed]
    return [size for size in grid if any(low < size < high for low, high in doubtful)]


def falling(timings: Mapping[float, Timing]) -> dict[float, float]:
    """Sizes whose time lies, for all their spread, below that of a smaller size, with that time: more work that takes
    less time, which cannot be."""
    found = {}
    longest: Timing | None = None
    for size, timing in sorted(timings.items()):
        if longest and timing.high_ms < longest.low_ms:
            found[size] = longest.ms
        if longest is None or timing.low_ms > longest.low_ms:
            longest = timing
    return found
