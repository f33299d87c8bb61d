"""Parts of a weight are parts of one whole, whatever the plan, and cost no more memory than their own."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("paddle")

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.runtime.weights import BLOCK_ROWS, SeededWeights, Slice

SOURCE = SeededWeights(seed=3, deviation=0.5)


@given(
    rows=st.integers(1, 3 * BLOCK_ROWS),
    columns=st.integers(1, 40),
    axis=st.sampled_from([0, 1]),
    parts=st.integers(1, 7),
    index=st.integers(0, 6),
)
def test_a_part_is_drawn_as_it_is_cut_from_the_whole(rows, columns, axis, parts, index):
    length = (rows, columns)[axis]
    part = Slice(axis, index % parts, parts, -(-length // parts) * parts)
    drawn = SOURCE("layer.weight", (rows, columns), part)
    np.testing.assert_array_equal(drawn, part.of(SOURCE("layer.weight", (rows, columns))))
    assert drawn.shape[axis] * parts == part.padded


def test_weights_differ_by_name_and_block_and_have_their_deviation():
    whole = SOURCE("layer.weight", (2 * BLOCK_ROWS, 64))
    assert not (whole == SOURCE("other.weight", whole.shape)).any()
    assert not (whole[:BLOCK_ROWS] == whole[BLOCK_ROWS:]).any()
    assert whole.std() == pytest.approx(0.5, rel=0.02)


def test_a_part_takes_the_memory_of_a_part():
    shape, parts = (64 * BLOCK_ROWS, 256), 16
    for axis in (0, 1):
        tracemalloc.start()
        part = SOURCE("layer.weight", shape, Slice(axis, 3, parts))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert part.nbytes * parts == np.prod(shape) * 4
        assert peak < part.nbytes * parts / 4
