"""Rank layout: groups partition the ranks, intervals cover the tokens, moves deliver the missing tokens and no more."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan import LayerStrategy
from paddlenlp_galvatron.plan.layout import TokenLayout, moves, own_chunks, token_axes, token_layout
from paddlenlp_galvatron.plan.mesh import Axis, Mesh

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
TOKENS = st.integers(0, 100)
WAYS = ("tp", "Megatron-SP", "Ulysses")


def divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]


@st.composite
def meshes(draw):
    """Up to two axes next to data parallelism, in any order."""
    size = draw(SIZES)
    inner = draw(st.sampled_from(divisors(size)))
    outer = draw(st.sampled_from(divisors(size // inner)))
    axes = draw(st.permutations([(Axis.TENSOR, inner), (Axis.ULYSSES, outer)]))
    return size, dict(axes), Mesh.of(size, *axes, consecutive=draw(st.booleans()))


@st.composite
def strategies(draw, sizes=SIZES):
    """(strategy, ranks of the stage, whether Megatron-SP is on)."""
    size, way = draw(sizes), draw(st.sampled_from(WAYS))
    strategy = LayerStrategy(draw(st.sampled_from(divisors(size))), way == "Ulysses", draw(st.booleans()))
    return strategy, size, way == "Megatron-SP"


def layouts(sizes=SIZES):
    return strategies(sizes).map(lambda drawn: token_layout(*drawn))


pairs_of_layouts = SIZES.flatmap(lambda size: st.tuples(layouts(st.just(size)), layouts(st.just(size))))


def held_by(layout: TokenLayout, tokens: int, samples: int | None = None) -> list[list[int]]:
    return [list(chain(*(range(*each) for each in some))) for some in layout.intervals(tokens, samples).tolist()]


@st.composite
def with_context(draw, size: int):
    """A layout of a stage of this size in which samples may be cut into mirrored chunks, and what its layer does."""
    degree = draw(st.sampled_from(divisors(size)))
    context, way = draw(st.sampled_from(divisors(size // degree))), draw(st.sampled_from(WAYS))
    strategy = LayerStrategy(degree, way == "Ulysses", draw(st.booleans()), context=context)
    return strategy, token_layout(strategy, size, way == "Megatron-SP"), way == "Megatron-SP"


@given(meshes())
def test_groups_partition_the_ranks(drawn):
    size, degrees, mesh = drawn
    assert mesh.size == size
    for axes in ((), (Axis.TENSOR,), (Axis.DATA,), (Axis.DATA, Axis.ULYSSES), tuple(Axis)):
        groups = mesh.groups(*axes).tolist()
        assert sorted(chain(*groups)) == list(range(size))
        assert {len(group) for group in groups} == {mesh.degree(*axes)}
        assert all(group == sorted(group) for group in groups)
    for rank in range(size):
        own = [mesh.group(rank, axis) for axis in (*degrees, Axis.DATA)]
        assert all(
            group[mesh.index(rank, axis)] == rank for group, axis in zip(own, (*degrees, Axis.DATA), strict=True)
        )
        assert set.intersection(*map(set, own)) == {rank}


@given(meshes(), st.data())
def test_copies_split_a_tp_group_into_its_neighbours(drawn, data):
    _, degrees, mesh = drawn
    copies = data.draw(st.sampled_from(divisors(degrees[Axis.TENSOR])))
    shares = mesh.sharing(copies).groups(Axis.COPIES).tolist()
    assert sorted(shares) == sorted(
        group[first : first + copies]
        for group in mesh.groups(Axis.TENSOR).tolist()
        for first in range(0, len(group), copies)
    )


def test_consecutive_and_strided():
    assert Mesh.of(8, (Axis.TENSOR, 4)).groups(Axis.TENSOR).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Mesh.of(8, (Axis.TENSOR, 4), consecutive=False).groups(Axis.TENSOR).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(strategies(), TOKENS)
def test_intervals_cover_the_tokens(drawn, tokens: int):
    """Over every group of the axes that cut them; along the other axes ranks hold the same."""
    strategy, size, sequence_parallel = drawn
    mesh, held = strategy.mesh(size), held_by(token_layout(*drawn), tokens)
    cut = token_axes(sequence_parallel)
    for group in mesh.groups(*cut).tolist():
        assert sorted(chain(*(held[rank] for rank in group))) == list(range(tokens))
    for group in mesh.groups(*set(Axis) - set(cut)).tolist():
        assert all(held[rank] == held[group[0]] for rank in group)


@given(strategies(), TOKENS)
def test_a_tp_group_holds_the_samples_of_its_dp_index(drawn, samples: int):
    """For any layout, the ranks next to each other together hold the whole samples that their layer works on."""
    strategy, size, _ = drawn
    mesh, length = strategy.mesh(size), 12
    held = held_by(token_layout(*drawn), samples * mesh.degree(Axis.DATA) * length)
    for group in mesh.groups(Axis.TENSOR, Axis.ULYSSES).tolist():
        index = mesh.index(group[0], Axis.DATA)
        together = sorted(set(chain(*(held[rank] for rank in group))))
        assert together == list(range(index * samples * length, (index + 1) * samples * length))
        assert [held[rank] for rank in group] == sorted(held[rank] for rank in group)


@given(pairs_of_layouts, st.integers(1, 9))
def test_layouts_are_equal_where_ranks_hold_the_same(pair, each: int):
    one, other = pair
    tokens = one.size * each
    assert (one == other) == (held_by(one, tokens) == held_by(other, tokens))


@given(st.sampled_from([4, 6, 8, 12]), st.integers(1, 2), st.integers(1, 2), st.data())
def test_chunks_of_every_sample_are_mirrored(size: int, each: int, piece: int, data):
    """The ranks of a place on the context axis have, of each sample of their dp index, a chunk near the front and the
    one as near the end, and share them out; over all places that is the whole sample, and as much to attend to."""
    strategy, layout, sequence_parallel = data.draw(with_context(size))
    mesh, context = strategy.mesh(size), strategy.context
    samples, length = each * mesh.degree(Axis.DATA), 2 * size * piece
    held = held_by(layout, samples * length, samples)
    assert all(tokens == sorted(tokens) for tokens in held)
    for rank in range(size):
        place, first = mesh.index(rank, Axis.CONTEXT), mesh.index(rank, Axis.DATA) * each
        chunks = own_chunks(place, context, length) if context > 1 else ((0, length),)
        whole = [
            sample * length + token
            for sample in range(first, first + each)
            for start, stop in chunks
            for token in range(start, stop)
        ]
        finer = set(token_axes(sequence_parallel)) - {Axis.DATA, Axis.CONTEXT}
        shares = [held[other] for other in mesh.group(rank, *finer)]
        assert list(chain(*shares)) == whole
        if context > 1:
            assert sum(start + stop for start, stop in chunks) == 2 * length


@given(st.sampled_from([4, 6, 8]), st.integers(1, 2), st.data())
def test_moves_between_mirrored_chunks_and_others_deliver(size: int, each: int, data):
    (_, source, _), (_, target, _) = (data.draw(with_context(size)) for _ in range(2))
    samples, length = each * size, 2 * size
    check_moves(*(layout.intervals(samples * length, samples) for layout in (source, target)))


def check_moves(source: np.ndarray, target: np.ndarray) -> None:
    held = [set(chain(*(range(*each) for each in some))) for some in source.tolist()]
    received: list[list[int]] = [[] for _ in held]
    for move in moves(source, target):
        piece = range(move.start, move.stop)
        assert piece
        assert set(piece) <= held[move.source]
        if move.source != move.target:
            assert not set(piece) & held[move.target]
        received[move.target] += piece
    assert received == [list(chain(*(range(*each) for each in some))) for some in target.tolist()]


@given(pairs_of_layouts, TOKENS)
def test_moves_deliver_what_is_missing_and_no_more(pair, tokens: int):
    check_moves(*(layout.intervals(tokens) for layout in pair))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())
def test_moves_of_ranks_that_hold_several_intervals(ranks: int, each: int, back: bool):
    """As causal context parallelism would: rank i holds the i-th chunk from the front and the i-th from the end."""
    chunks = [(i * each, (i + 1) * each) for i in range(2 * ranks)]
    mirrored = np.array([[chunks[i], chunks[-1 - i]] for i in range(ranks)])
    plain = token_layout(None, ranks).intervals(2 * ranks * each)
    check_moves(*((mirrored, plain) if back else (plain, mirrored)))


@given(layouts(), TOKENS)
def test_equal_layouts_move_nothing(layout: TokenLayout, tokens: int):
    held = layout.intervals(tokens)
    assert all(move.source == move.target for move in moves(held, held))


@given(SIZES, st.data())
def test_consecutive_sharded_layers_of_any_degree_move_nothing(size: int, data):
    degrees = st.sampled_from(divisors(size))
    source, target = (token_layout(LayerStrategy(data.draw(degrees)), size, sequence_parallel=True) for _ in range(2))
    assert source == target == token_layout(LayerStrategy(size, ulysses=True), size) == token_layout(None, size)
