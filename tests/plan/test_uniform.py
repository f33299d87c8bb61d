"""GLOBAL mode: one strategy for all layers."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.aliases import canonical_name
from paddlenlp_galvatron.options.uniform import DegreeOptions, UniformOptions, uniform_plan
from paddlenlp_galvatron.plan import Recompute, Schedule, plan_from_dict, plan_to_dict
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.strategy import DataParallel
from paddlenlp_galvatron.plan.uniform import even_stages


def test_every_option_is_in_the_plan():
    plan = uniform_plan(
        layers=7,
        world_size=16,
        global_train_batch_size=32,
        pp_deg=2,
        global_tp_deg=4,
        global_tp_consec=False,
        sdp=True,
        chunks=4,
        global_checkpoint=True,
        pipeline_type="gpipe",
        vocab_tp=2,
        default_dp_type="zero2",
        use_ulysses=True,
    )
    (layer,) = set(plan.layers)
    assert (layer.degree, layer.ulysses, layer.consecutive, layer.recompute) == (4, True, False, Recompute.FULL)
    assert layer.dp_type is plan.vocab.dp_type is DataParallel.ZERO3
    assert (plan.vocab.degree, plan.vocab.ulysses, plan.default_dp_type) == (2, True, DataParallel.ZERO2)
    assert (plan.stages, plan.schedule) == ((4, 3), Schedule.GPIPE)
    assert (plan.global_batch, plan.micro_batches, plan.world_size) == (32, 4, 16)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_experts_by_the_names_of_three_programs():
    few = {"layers": 4, "world_size": 8, "global_train_batch_size": 16}
    plan = uniform_plan(**few, global_ep_deg=4, global_tp_of_ep_deg=2)
    assert {layer.experts[:2] for layer in plan.layers} == {(4, 2)}
    for name in ("expert_parallel_degree", canonical_name("expert_model_parallel_size")):
        uniform = DegreeOptions.from_values({name: 4}).onto(
            UniformOptions.from_values({"global_train_batch_size": 16}), 8
        )
        assert uniform.plan(4, 8).layers[0].ep == 4
    options = UniformOptions(global_train_batch_size=16, global_ep_deg=4, global_tp_of_ep_deg=2)
    plan = options.plan(4, 8, dense_layers=(0, 2))
    assert [layer.experts[:2] for layer in plan.layers] == [(1, 1), (4, 2), (1, 1), (4, 2)]


@pytest.mark.parametrize(("size", "sharding"), [(2, 2), (4, None), (-1, None)])
def test_paddlenlp_shards_in_parts_of_the_data_parallel_ranks(size, sharding):
    stated = {"sharding": "stage3", "sharding_parallel_degree": size, "tensor_parallel_degree": 2}
    uniform = DegreeOptions.from_values(stated).onto(UniformOptions.from_values({"global_train_batch_size": 16}), 8)
    plan = uniform.plan(4, 8)
    assert {layer.sharding for layer in plan.layers} == {plan.vocab.sharding} == {sharding}


@given(st.integers(1, 200), st.integers(1, 20))
def test_stages_are_as_even_as_can_be(layers, stages):
    division = even_stages(layers, stages)
    assert sum(division) == layers and len(division) == stages
    assert max(division) - min(division) <= 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_tp_deg": 3}, "tp_sizes_enc: degree 3 of layers 0-3"),
        ({"pp_deg": 5}, "pp_deg: 5 stages are more than the 4 layers"),
        ({"chunks": 0}, "chunks: must be at least 1"),
        ({"chunks": 3}, "chunks: 3 micro-batches do not divide global_bsz 16"),
        ({"pipeline_type": "1f1b"}, "pipeline_type: '1f1b' is unknown; choose one of pipedream_flush, gpipe"),
        ({"default_dp_type": "zero1"}, "default_dp_type: 'zero1' is unknown"),
    ],
)
def test_bad_options_are_refused_by_name(options, named):
    with pytest.raises(UserError) as error:
        uniform_plan(**({"layers": 4, "world_size": 8, "global_train_batch_size": 16} | options))
    assert named in str(error.value)


SIZES = dict.fromkeys(("layers", "world_size"), st.integers(1, 24))
DEGREES = dict.fromkeys(("global_train_batch_size", "pp_deg", "global_tp_deg", "vocab_tp"), st.integers(-2, 24))


@given(st.fixed_dictionaries(SIZES | DEGREES))
def test_any_numbers_make_a_plan_or_a_user_error(options):
    with suppress(UserError):
        assert find_faults(uniform_plan(**options)) == []
