"""Parts of a weight under one plan fill those under any other, number for number."""

import numpy as np
import pytest

pytest.importorskip("paddle")

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.runtime.weights import Slice
from paddlenlp_galvatron.training.checkpoint.loading import WeightPiece, transfers


def split(shape: tuple[int, ...], axis: int | None, parts: int, shards: int) -> list[WeightPiece]:
    """All parts of a weight that is split along an axis, padded, and whose slices are cut flat into shards."""
    found = []
    for index in range(parts if axis is not None else 1):
        cut = Slice() if axis is None else Slice(axis, index, parts, -(-shape[axis] // parts) * parts)
        lengths = [stop - start for start, stop in (cut.interval(k, length) for k, length in enumerate(shape))]
        size = int(np.prod(lengths))
        edges = [shard * -(-size // shards) for shard in range(shards)]
        found += [
            WeightPiece("w", shape, cut, start, min(start + -(-size // shards), size))
            for start in edges
            if start < size
        ]
    return found


layouts = st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 5), st.integers(1, 7))


@given(shape=st.one_of(st.tuples(st.integers(1, 12)), st.tuples(st.integers(1, 9), st.integers(1, 9))), data=st.data())
def test_numbers_arrive_where_they_belong(shape, data):
    layout, other = data.draw(layouts), data.draw(layouts)
    if len(shape) == 1:
        layout, other = [(0 if axis == 1 else axis, *rest) for axis, *rest in (layout, other)]
    whole = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    sources = split(shape, *layout)
    stored = [source.slice.of(whole).flatten()[source.start : source.stop] for source in sources]
    for target in split(shape, *other):
        out = np.zeros(target.stop - target.start, np.float32)
        for source, numbers in zip(sources, stored, strict=True):
            for move in transfers(source, target):
                given_, wanted = move.source, move.target
                for row in range(move.row, move.row + move.rows):
                    a = given_.begin + (row - given_.row) * given_.columns + move.column - given_.column
                    b = wanted.begin + (row - wanted.row) * wanted.columns + move.column - wanted.column
                    out[b : b + move.columns] = numbers[a : a + move.columns]
        expected = target.slice.of(whole).flatten()[target.start : target.stop]
        np.testing.assert_array_equal(out, expected)
        assert target.real == np.count_nonzero(expected)
