"""A plan on other numbers of GPUs: kept and changed fields, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan, valid_plans, with_layer

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.planner.scale import changes, scalings


@given(valid_plans())
def test_on_twice_the_gpus_only_data_parallelism_grows(of):
    twice = scalings(of, 2 * of.world_size, 2 * of.global_batch)[0]
    assert (twice.layers, twice.vocab, twice.stages, twice.micro_batches) == (
        of.layers,
        of.vocab,
        of.stages,
        of.micro_batches,
    )
    for part in (*of.layers, of.vocab):
        assert twice.dp(part) == 2 * of.dp(part)
        assert twice.micro_batch / twice.dp(part) == of.micro_batch / of.dp(part)
    assert [change.field for change in changes(of, twice)] == ["world_size", "global_bsz", "data parallel"]
    assert scalings(twice, of.world_size, of.global_batch)[0] == of  # and back
    assert list(changes(of, of)) == []


@given(valid_plans(), st.integers(1, 5))
def test_the_global_batch_stays_as_near_as_whole_micro_batches_allow(of, nodes):
    try:
        made = scalings(of, max(1, nodes * of.world_size // 2))
    except UserError:
        return
    for each in made:
        assert each.global_batch % each.micro_batch == 0
        least = each.global_batch == each.micro_batch
        assert abs(each.global_batch - of.global_batch) <= each.micro_batch / 2 or least
        dp = each.dp(each.layers[0])
        assert each.micro_batch * of.dp(of.layers[0]) == of.micro_batch * dp  # samples of a GPU


def test_the_number_of_stages_stays_where_it_can_and_one_stage_comes_last():
    of = plan(tp=2, pp=2, chunks=4)  # 8 ranks
    assert [one.pipeline for one in scalings(of, 4)] == [2, 1]
    assert [one.pipeline for one in scalings(of, 16)] == [2, 4, 1]
    assert scalings(of, 2)[0].stages == (4,)  # both stages on one GPU pair
    assert scalings(of, 16)[1].stages == (1, 1, 1, 1)
    assert {change.field for change in changes(of, scalings(of, 2)[0])} >= {"pp_deg", "pp_division"}


def test_a_batch_that_is_asked_for_sets_the_micro_batches():
    of = plan(tp=2, chunks=2)
    (same,) = (one for one in scalings(of, 4, of.global_batch) if one.pipeline == 1)
    assert (same.global_batch, same.micro_batches) == (of.global_batch, 2 * of.micro_batches)
    with pytest.raises(UserError, match=r"^batch: 7 is no multiple of the \d+ samples"):
        scalings(of, 8, 7)


def test_the_nearest_batch_may_be_the_larger_one():
    assert scalings(plan(tp=2, chunks=2), 6)[0].global_batch == 18  # 3 micro-batches of 6 samples; 16 were requested


def test_ranks_that_the_degrees_do_not_divide_are_named():
    with pytest.raises(UserError, match=r"gpus: 6 GPUs are no multiple of the 4"):
        scalings(with_layer(plan(tp=2), degree=4), 6)
