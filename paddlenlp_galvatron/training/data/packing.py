"""Which samples share a row, so that rows of a fixed length are filled: decided once, from lengths and their order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ...options.tuning import Packing

WINDOW = 500  # samples that PaddleNLP's greedy rule looks at together
Rows = list[list[int]]  # numbers of the samples of each row


def pack(lengths: Sequence[int], room: int, packing: Packing) -> Rows:
    """Rows of samples, none of which is longer than `room`; each sample once, whole."""
    if packing == "none":
        return [[number] for number in range(len(lengths))]
    if packing == "in_order":
        return _in_order(lengths, room)
    if packing == "greedy":
        numbers = range(len(lengths))
        windows = (numbers[first : first + WINDOW] for first in range(0, len(lengths), WINDOW))
        return [row for window in windows for row in _greedy(lengths, room, window)]
    return _best_fit(lengths, room)


def _in_order(lengths: Sequence[int], room: int) -> Rows:
    """PaddleNLP's zero_padding: a row is closed when the next sample does not fit."""
    rows: Rows = []
    left = -1
    for number, length in enumerate(lengths):
        if length > left:
            rows.append([])
            left = room
        rows[-1].append(number)
        left -= length
    return rows


def _greedy(lengths: Sequence[int], room: int, numbers: range) -> Rows:
    """PaddleNLP's greedy_zero_padding: a sample goes to the row with most room, or opens a new one."""
    rows: Rows = [[]]
    left = [room]
    for number in numbers:
        place = left.index(max(left))
        if lengths[number] > left[place]:
            place = len(rows)
            rows.append([])
            left.append(room)
        rows[place].append(number)
        left[place] -= lengths[number]
    return rows


def _best_fit(lengths: Sequence[int], room: int) -> Rows:
    """Best fit decreasing: the longest sample first, each into the row that it fills best. Rows are in the order of
    their first sample in the data."""
    rows: Rows = []
    open_rows: list[tuple[int, int]] = []  # room that is left, and which row; sorted
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = bisect_left(open_rows, (lengths[number], -1))
        if place < len(open_rows):
            left, row = open_rows.pop(place)
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        insort(open_rows, (left - lengths[number], row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
