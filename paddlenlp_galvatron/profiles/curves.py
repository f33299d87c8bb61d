"""Lookups in measured points: linear between them, a physical alpha-beta line beyond them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Curve:
    """Time over size: `y = alpha + beta * x` with `alpha, beta >= 0` outside the measured points, linear between them.

    A single point means proportional (`alpha = 0`). Beyond either end the line goes through the last measured point
    with the slope of the least-squares line, limited to `0 <= beta <= y / x` of that point, so that predictions are
    never negative and never fall with size.
    """

    points: tuple[tuple[float, float], ...]  # (x, y), x rising

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Curve through points in any order; x must be distinct and positive. Raises ValueError when there is none."""
        ordered = tuple(sorted(points))
        if not ordered:
            raise ValueError("a curve needs at least one point")
        return cls(ordered)

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """A curve of values that cannot fall with x: a point below an earlier one (noise) is lifted to it."""
        ordered = sorted(points)
        heights = accumulate((y for _, y in ordered), max)
        return cls.through((x, y) for (x, _), y in zip(ordered, heights, strict=True))

    def __call__(self, x: float) -> float:
        xs, ys = self._columns
        if x <= xs[0]:
            slope = self._slope(0)
            return max(ys[0] - slope * xs[0], 0.0) + slope * x
        if x >= xs[-1]:
            return ys[-1] + self._slope(-1) * (x - xs[-1])
        right = bisect_left(xs, x)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    @staticmethod
    def at_degree(by_degree: Mapping[int, float], degree: int) -> float:
        """Value at a degree: measured, or on the line in 1/degree, by which split parts fall."""
        if degree in by_degree:
            return by_degree[degree]
        return Curve.through((1 / d, value) for d, value in by_degree.items())(1 / degree)

    @property
    def latency(self) -> float:
        """Value at size zero."""
        return self(0.0)

    @cached_property
    def _columns(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(x for x, _ in self.points), tuple(y for _, y in self.points)

    @cached_property
    def _least_squares_slope(self) -> float:
        xs, ys = self._columns
        if len(xs) == 1:
            return ys[0] / xs[0]
        middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
        covariance = sum((x - middle_x) * (y - middle_y) for x, y in self.points)
        return covariance / sum((x - middle_x) ** 2 for x in xs)

    def _slope(self, end: int) -> float:
        x, y = self.points[end]
        return min(max(self._least_squares_slope, 0.0), y / x)
