"""Rank layout: groups partition the ranks, intervals cover the tokens, moves deliver what is missing and no more."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.plan.layout import Grid, TokenLayout, boundary_layout, moves

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
TOKENS = st.integers(0, 100)


def grids(sizes=SIZES):
    degrees = sizes.flatmap(lambda n: st.sampled_from([(n, d) for d in range(1, n + 1) if n % d == 0]))
    return st.builds(lambda pair, consecutive: Grid(*pair, consecutive), degrees, st.booleans())


def layouts(sizes=SIZES):
    return st.builds(TokenLayout, grids(sizes), st.booleans())


pairs_of_layouts = SIZES.flatmap(lambda size: st.tuples(layouts(st.just(size)), layouts(st.just(size))))


@given(grids())
def test_groups_partition_the_ranks(grid: Grid):
    ranks = list(range(grid.size))
    for groups, size in ((grid.tp_groups(), grid.degree), (grid.dp_groups(), grid.dp)):
        assert sorted(chain(*groups)) == ranks
        assert {len(group) for group in groups} == {size}
    for rank in ranks:
        assert grid.rank(grid.dp_index(rank), grid.index(rank)) == rank
        assert grid.tp_group(rank)[grid.index(rank)] == rank
        assert grid.dp_group(rank)[grid.dp_index(rank)] == rank
        assert set(grid.tp_group(rank)) & set(grid.dp_group(rank)) == {rank}


@given(grids(), st.data())
def test_copies_split_a_tp_group_into_its_parts(grid: Grid, data):
    parts = data.draw(st.sampled_from([p for p in range(1, grid.degree + 1) if grid.degree % p == 0]))
    for group in grid.tp_groups():
        shares = {grid.copies(rank, parts) for rank in group}
        assert len(shares) == parts
        assert sorted(chain(*shares)) == sorted(group)
        assert all(rank in grid.copies(rank, parts) for rank in group)


def test_consecutive_and_strided():
    assert Grid(8, 4).tp_groups() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Grid(8, 4, consecutive=False).tp_groups() == [(0, 2, 4, 6), (1, 3, 5, 7)]


@given(layouts(), TOKENS)
def test_intervals_cover_the_tokens(layout: TokenLayout, tokens: int):
    """Sharded, over all ranks; else over every dp group, and the same within a tp group."""
    held = layout.intervals(tokens)
    for group in [range(layout.grid.size)] if layout.sharded else layout.grid.dp_groups():
        assert sorted(chain(*(range(*held[rank]) for rank in group))) == list(range(tokens))
    if not layout.sharded:
        for group in layout.grid.tp_groups():
            assert len({held[rank] for rank in group}) == 1


@given(layouts(), TOKENS)
def test_a_tp_group_holds_the_samples_of_its_dp_index(layout: TokenLayout, samples: int):
    """Whatever the layout, the tp group together holds the whole samples that its layer works on."""
    grid, length = layout.grid, 12
    tokens = samples * grid.dp * length
    held = layout.intervals(tokens)
    for group in grid.tp_groups():
        index = grid.dp_index(group[0])
        together = sorted(set(chain(*(range(*held[rank]) for rank in group))))
        assert together == list(range(index * samples * length, (index + 1) * samples * length))
        assert [held[rank] for rank in group] == sorted(held[rank] for rank in group)


@given(pairs_of_layouts, TOKENS)
def test_moves_deliver_what_is_missing_and_no_more(pair, tokens: int):
    source, target = pair
    held = source.intervals(tokens)
    received: list[list[int]] = [[] for _ in held]
    for move in moves(source, target, tokens):
        piece = range(move.start, move.stop)
        assert piece
        assert set(piece) <= set(range(*held[move.source]))
        if move.source != move.target:
            assert not set(piece) & set(range(*held[move.target]))
        received[move.target] += piece
    assert received == [list(range(*wanted)) for wanted in target.intervals(tokens)]


@given(layouts(), TOKENS)
def test_equal_layouts_move_nothing(layout: TokenLayout, tokens: int):
    assert all(move.source == move.target for move in moves(layout, layout, tokens))


@given(SIZES, st.data(), TOKENS)
def test_consecutive_sharded_layers_of_any_degree_move_nothing(size: int, data, tokens: int):
    degrees = st.sampled_from([d for d in range(1, size + 1) if size % d == 0])
    source, target = (TokenLayout(Grid(size, data.draw(degrees)), sharded=True) for _ in range(2))
    assert source.intervals(tokens) == target.intervals(tokens) == boundary_layout(size).intervals(tokens)
