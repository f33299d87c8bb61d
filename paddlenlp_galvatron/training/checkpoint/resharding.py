"""Which stored numbers fill a part of a weight: from the parts of one plan to those of any other.

A piece is elements `start..stop-1` of the flattened slice of a weight that a rank holds (`runtime.units.Piece`). In the
whole weight, a matrix, that is up to three rectangles: the end of a row, whole rows, the beginning of a row. Vectors
are matrices of one column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...runtime.weights import Slice


class Rectangle(NamedTuple):
    """Rows and columns of a whole weight, and where its numbers begin in the piece."""

    row: int
    column: int
    rows: int
    columns: int
    begin: int


class Transfer(NamedTuple):
    """Rows of a stored rectangle and the columns of them that go to a rectangle of the target."""

    source: Rectangle
    target: Rectangle
    row: int  # first row and column in the whole weight, and how many
    column: int
    rows: int
    columns: int

    @property
    def numbers(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class WeightPart:
    """A piece of a weight by numbers alone, as checkpoints describe it."""

    weight: str
    shape: tuple[int, ...]  # of the whole weight
    slice: Slice
    start: int
    stop: int

    @property
    def rows(self) -> range:
        """Rows of the whole weight within which the part lies."""
        top, _ = self.slice.interval(0, self.shape[0])
        left, right = self.slice.interval(1, self.shape[1]) if len(self.shape) > 1 else (0, 1)
        return range(top + self.start // (right - left), top + -(-self.stop // (right - left)))

    def rectangles(self) -> Iterator[Rectangle]:
        """In the order of the numbers. Padding is left out: it is zero in every plan."""
        height, width = (self.shape[0], 1) if len(self.shape) == 1 else self.shape
        top, bottom = self.slice.interval(0, height)
        left, right = self.slice.interval(1, width) if len(self.shape) > 1 else (0, 1)
        width_held = right - left
        position = self.start
        while position < self.stop:
            row, column = divmod(position, width_held)
            if column or self.stop - position < width_held:
                rows, columns = 1, min(width_held - column, self.stop - position)
            else:
                rows, columns = (self.stop - position) // width_held, width_held
            # Clip what is beyond the real weight. Padding is at the end of the axis that is split.
            real_rows = min(rows, max(0, min(bottom, height) - (top + row)))
            real_columns = min(columns, max(0, min(right, width) - (left + column)))
            if columns == width_held and real_columns < columns:  # padded columns: row by row
                for k in range(real_rows):
                    begin = position - self.start + k * width_held
                    if real_columns:
                        yield Rectangle(top + row + k, left + column, 1, real_columns, begin)
            elif real_rows and real_columns:
                yield Rectangle(top + row, left + column, real_rows, real_columns, position - self.start)
            position += rows * columns

    @property
    def real(self) -> int:
        """Numbers that are no padding."""
        return sum(rectangle.rows * rectangle.columns for rectangle in self.rectangles())


def transfers(source: WeightPart, target: WeightPart) -> Iterator[Transfer]:
    """Copies from a stored part to a part of the target. Both are of one weight."""
    for given in source.rectangles():
        for wanted in target.rectangles():
            top, left = max(given.row, wanted.row), max(given.column, wanted.column)
            bottom = min(given.row + given.rows, wanted.row + wanted.rows)
            right = min(given.column + given.columns, wanted.column + wanted.columns)
            if top < bottom and left < right:
                yield Transfer(given, wanted, top, left, bottom - top, right - left)
