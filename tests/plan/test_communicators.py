"""Which groups a plan has, and in which order they are made."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.plan.communicators import exchanging, fused_loss_groups, in_rounds, stage_groups

RANKS = st.lists(st.integers(0, 12), min_size=2, max_size=5, unique=True).map(lambda ranks: tuple(sorted(ranks)))


def chain(groups) -> int:
    """Groups that are made one after the other at least, where each waits for all of its ranks."""
    done: dict[int, int] = {}
    for ranks, _ in groups:
        turn = 1 + max(done.get(rank, 0) for rank in ranks)
        done.update(dict.fromkeys(ranks, turn))
    return max(done.values(), default=0)


@given(st.sets(st.tuples(RANKS, st.sampled_from(("", "down", "up"))), max_size=30), st.randoms())
def test_rounds_have_every_group_once_in_an_order_that_is_the_same_everywhere(groups, random):
    ordered, shuffled = in_rounds(groups), list(groups)
    random.shuffle(shuffled)
    assert sorted(ordered) == sorted(groups) and in_rounds(shuffled) == ordered


def test_a_pipelines_neighbours_take_rounds_that_do_not_grow_with_it():
    for stages in (4, 64):
        pairs = [((rank, rank + 1), use) for rank in range(stages - 1) for use in ("down", "up")]
        assert chain(sorted(pairs)) >= stages and chain(in_rounds(pairs)) == 4


def shape(vocab_size: int = 512) -> ModelShape:
    return ModelShape("small", "llama", 8, 64, 96, 8, 8, vocab_size, 64)


def test_dense_layers_add_no_groups_of_experts():
    mixture = replace(shape(), family="qwen3_moe", experts=4, experts_per_token=2, expert_size=8)
    made = uniform_plan(layers=8, world_size=8, global_train_batch_size=8, global_ep_deg=4, dense_layers=range(8))
    dense = stage_groups(made, replace(mixture, dense_layers=tuple(range(7))), 64)
    assert exchanging(made, replace(mixture, dense_layers=tuple(range(7)))) == {(rank,) for rank in range(8)}
    first = uniform_plan(layers=8, world_size=8, global_train_batch_size=8, global_ep_deg=4, dense_layers=(0, 1))
    of_experts = {(tuple(range(start, start + 4)), "") for start in (0, 4)}
    assert of_experts <= stage_groups(first, replace(mixture, dense_layers=(0, 1)), 64) and not of_experts & dense


def test_the_loss_has_a_kernel_on_the_last_stage_where_the_vocabulary_is_split_without_padding():
    plan = uniform_plan(layers=8, world_size=8, global_train_batch_size=8, pp_deg=2, global_tp_deg=2, vocab_tp=2)
    assert fused_loss_groups(plan, shape()) == {(4, 5), (6, 7)} and not fused_loss_groups(plan, shape(511))
    whole = uniform_plan(layers=8, world_size=8, global_train_batch_size=8, pp_deg=2)
    assert not fused_loss_groups(whole, shape())
    assert {(ranks, "") for ranks in fused_loss_groups(plan, shape())} <= stage_groups(plan, shape(), 64)
