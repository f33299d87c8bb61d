"""Parts of a weight are parts of one whole, for any plan, and cost no more memory than their own."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import DataParallel
from paddlenlp_galvatron.runtime import lora, units, weights
from paddlenlp_galvatron.runtime.weights import TILE, WHOLE, Rows, SeededWeights, Slice

SOURCE = SeededWeights(seed=3, deviation=0.5)


@given(
    rows=st.integers(1, 3 * TILE[0]),
    columns=st.integers(1, 3 * TILE[1]),
    axis=st.sampled_from([0, 1]),
    parts=st.integers(1, 7),
    index=st.integers(0, 6),
    data=st.data(),
)
def test_a_part_is_drawn_as_it_is_cut_from_the_whole(rows, columns, axis, parts, index, data):
    length = (rows, columns)[axis]
    part = Slice(axis, index % parts, parts, -(-length // parts) * parts)
    drawn, whole = SOURCE("layer.weight", (rows, columns), part), SOURCE("layer.weight", (rows, columns))
    np.testing.assert_array_equal(drawn, part.of(whole))
    assert drawn.shape[axis] * parts == part.padded
    first = data.draw(st.integers(0, len(drawn)))
    some = Rows(**vars(part), first=first, last=data.draw(st.integers(first, len(drawn))))
    np.testing.assert_array_equal(SOURCE("layer.weight", (rows, columns), some), drawn[first : some.last])
    np.testing.assert_array_equal(some.of(whole), drawn[first : some.last])


def test_weights_differ_by_name_and_tile_and_have_their_deviation():
    rows, columns = TILE
    whole = SOURCE("layer.weight", (2 * rows, 2 * columns))
    assert not (whole == SOURCE("other.weight", whole.shape)).any()
    assert not (whole[:rows] == whole[rows:]).any() and not (whole[:, :columns] == whole[:, columns:]).any()
    assert abs(np.corrcoef(whole[:, :columns].ravel(), whole[:, columns:].ravel())[0, 1]) < 0.03
    assert whole.std() == pytest.approx(0.5, rel=0.02)


def test_a_part_takes_the_memory_of_a_part():
    shape, parts = (256 * TILE[0], 16 * TILE[1]), 16
    for axis in (0, 1):
        tracemalloc.start()
        part = SOURCE("layer.weight", shape, Slice(axis, 3, parts))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert part.nbytes * parts == np.prod(shape) * 4
        assert peak < part.nbytes * parts / 4


class Counting:
    """A source that counts the requested numbers."""

    def __init__(self):
        self.numbers = 0

    def __call__(self, name, shape, part=WHOLE):
        values = part.of(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name))
        self.numbers += values.size
        return values


@pytest.mark.parametrize("kind", DataParallel)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_rank_of_a_group_makes_a_share_of_its_weights(monkeypatch, kind, ranks):
    """And all have them whole, or their part, as if they had made all."""
    shapes, part = {"a": (7, 9), "long": (5, 6), "b": (1, 3)}, Slice(1, 1, 3)
    made, shares = [], []

    def all_gather(share, group):
        shares.append(share.numpy())
        return paddle.to_tensor(np.concatenate(shares))  # the last rank has all

    monkeypatch.setattr(units, "all_gather_first", all_gather)
    for rank in range(ranks):
        group, source = SimpleNamespace(rank=rank, nranks=ranks, ranks=[*range(ranks)], id=1), Counting()
        held = [
            weights.ShardedParameter(
                name, shape, part, weights.zero_parameter(part.size(shape), "float32"), group, 1, source=source
            )
            for name, shape in shapes.items()
        ]
        unit = units.make_unit(held, kind, every_micro_batch=False)
        if rank < ranks - 1 and kind is not DataParallel.ZERO3:
            shares.append(unit._first_share().numpy())
        else:
            unit.begin()
        made.append((unit, source.numbers))
    total = sum(np.prod(part.size(shape)) for shape in shapes.values())
    assert max(numbers for _, numbers in made) <= total // ranks + 1 + 4 * 2 * len(shapes)  # and rows at both ends
    whole = np.concatenate([part.of(Counting()(name, shape)).ravel() for name, shape in shapes.items()])
    if kind is DataParallel.ZERO3:
        assert not shares  # without any message
        found = np.concatenate([unit._shard.numpy() for unit, _ in made])
    else:
        found = np.concatenate([weight.tensor.numpy().ravel() for weight in made[-1][0].weights])
    np.testing.assert_array_equal(found[: len(whole)], whole)
    assert not found[len(whole) :].any()


@pytest.mark.parametrize("kind", [DataParallel.ZERO2, DataParallel.ZERO3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("parts", "ranks"), [(2, 2), (3, 2), (2, 5)])
def test_zero_in_a_part_makes_a_share_of_the_weights_of_all_ranks(monkeypatch, kind, frozen, parts, ranks):
    """And each has its shard, as if it had made all of it."""
    shapes, sent, found = {"a": (70, 9), "long": (300, 2), "b": (1, 3)}, {}, {}
    whole = np.concatenate([Counting()(name, shape).ravel() for name, shape in shapes.items()])
    whole = np.pad(whole, (0, -len(whole) % ranks)).reshape([ranks, -1])

    def group(rank, members):
        return SimpleNamespace(rank=members.index(rank), nranks=len(members), ranks=members, id=1)

    def all_gather(share, group):
        key = tuple(group.ranks)
        sent[key, group.rank] = share.numpy()
        return paddle.to_tensor(
            np.concatenate([sent.get((key, rank), sent[key, group.rank]) for rank in range(group.nranks)])
        )

    monkeypatch.setattr(units, "all_gather_first", all_gather)
    for rank in [*range(parts * ranks)] * 3:  # the last time everyone has sent what it has
        part, index = divmod(rank, ranks)
        source, everyone = Counting(), group(rank, [*range(parts * ranks)])
        shard, replicas = (
            group(rank, [*range(part * ranks, (part + 1) * ranks)]),
            group(rank, [*range(index, parts * ranks, ranks)]),
        )
        held = [
            weights.ShardedParameter(
                name, shape, WHOLE, weights.zero_parameter(shape, "float32"), everyone, 1,
                shard_group=shard, replica_group=replicas, source=source,
            )
            for name, shape in shapes.items()
        ]  # fmt: skip
        unit = (
            lora.FrozenUnits._make(None, held, kind) if frozen else units.make_unit(held, kind, every_micro_batch=False)
        )
        unit.begin()
        assert source.numbers <= whole.size // (parts * ranks) + 2 + 2 * 9 * len(shapes)  # and rows at both ends
        found[rank] = unit
    for rank, unit in found.items():
        if kind is DataParallel.ZERO3:
            np.testing.assert_array_equal(unit._shard.numpy(), whole[rank % ranks])
        else:
            joined = np.concatenate([weight.tensor.numpy().ravel() for weight in unit.weights])
            np.testing.assert_array_equal(joined, whole.ravel()[: joined.size])


def test_a_small_weight_is_made_by_one_of_the_ranks_that_hold_it(monkeypatch):
    sent, source = [], Counting()
    monkeypatch.setattr(weights, "broadcast", lambda tensor, group: sent.append(group.rank))
    for rank in (0, 1):
        held = weights.zero_parameter([4], "float32"), SimpleNamespace(rank=rank)
        weights.fill_whole(weights.ShardedParameter("norm", (4,), WHOLE, *held, 1, source=source))
    assert (source.numbers, sent) == (4, [0, 1])
