"""The search on the real cost model: equal to enumeration, what it takes for granted about prices, and the
strategies that it is offered."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from cost_examples import HARDWARE, MODEL, NARROW, SEQ, WIDE, example, two_types
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.cost_model import StageSetting
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy
from paddlenlp_galvatron.plan.export import stock_arguments
from paddlenlp_galvatron.planner import SearchOptions, search
from paddlenlp_galvatron.planner.explain import MOST_CHANGES, what_ifs
from paddlenlp_galvatron.planner.question import Question, SharedTime

from .random_cost import best_by_enumeration

QUICK = (1, 2, 3, 4)  # of the seeds, those whose enumeration takes little


def check_against_enumeration(seed: int, two: bool = False) -> bool:
    """Whether there was a plan."""
    draw = random.Random(seed)
    models = [replace(MODEL, layers=draw.choice((2, 3)))]
    if two:
        models = [replace(NARROW, layers=draw.choice((1, 2))), replace(WIDE, layers=1)]
    values: dict[str, Any] = {
        "num_nodes": draw.choice((1, 2)), "num_gpus_per_node": 2, "memory_constraint": draw.uniform(0.2, 3),
        "settle_bsz": draw.choice((4, 8)), "seq_length": SEQ, "sequence_parallel": draw.random() < 0.5,
        "no_async_grad_reduce": draw.random() < 0.3, "default_dp_type": draw.choice(("ddp", "zero2")),
        "disable_ckpt": draw.random() < 0.4, "disable_sdp": draw.random() < 0.4, "disable_vtp": draw.random() < 0.5,
        "simplest_within": 0.0,
        **({"sp_space": "tp+sp"} if draw.random() < 0.5 else {"tp_consec": draw.random() < 0.5}),
    }  # fmt: skip
    options = SearchOptions.from_mapping({"gap": 0} | values)
    cost = (two_types if two else example)(
        num_nodes=options.num_nodes,
        gpus_per_node=2,
        hardware=HARDWARE,
        model=models if two else models[0],
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=not options.no_async_grad_reduce,
    )
    result, best = search(models, cost, options), best_by_enumeration(models, cost, options)
    if best == inf:
        assert result.best is None, seed
        return False
    assert result.time_s / options.settle_bsz == pytest.approx(best, rel=1e-9) and result.gap <= 1e-9, seed
    return True


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("seeds", [QUICK, pytest.param(range(20), marks=pytest.mark.slow)], ids=["some", "all"])
def test_equals_enumeration(two: bool, seeds: Sequence[int]) -> None:
    assert 0.4 * len(seeds) < sum(check_against_enumeration(seed, two) for seed in seeds) < len(seeds)


@given(
    degree=st.sampled_from((1, 2, 4, 8)),
    ulysses=st.booleans(),
    consecutive=st.booleans(),
    micro_batch=st.sampled_from((8, 16, 64)),
    sequence_parallel=st.booleans(),
    async_grad_reduce=st.booleans(),
)
def test_zero3_and_recompute_only_add_to_a_layers_passes(
    degree: int, ulysses: bool, consecutive: bool, micro_batch: int, sequence_parallel: bool, async_grad_reduce: bool
) -> None:
    cost = example(sequence_parallel=sequence_parallel, async_grad_reduce=async_grad_reduce)
    stage = StageSetting(8, micro_batch, 2, 1)
    for dp_type in DataParallel:
        strategy = LayerStrategy(degree, ulysses, consecutive, dp_type)
        once, again = (cost.layer_cost(replace(strategy, recompute=on), stage) for on in (False, True))
        assert again.passes_ms.forward >= once.passes_ms.forward and again.passes_ms.backward >= once.passes_ms.backward
        if async_grad_reduce:
            plain = cost.layer_cost(replace(strategy, dp_type=DataParallel.DDP), stage)
            assert (
                once.passes_ms.forward >= plain.passes_ms.forward
                and once.passes_ms.backward >= plain.passes_ms.backward
            )


def test_many_nodes_shard_in_parts_and_explain_says_what_they_gain() -> None:
    asked = {"model_size": "llama2-7b", "device": "a100-80gb", "world_size": 512, "settle_bsz": 4096}
    question, all_alone = (Question.of(asked | {"sharding_sizes": sizes}) for sizes in ("1", "0"))
    found, over_all = question.search(), all_alone.search()
    assert found.time_s < 0.99 * over_all.time_s and found.fastest_gap == over_all.fastest_gap == 0
    sizes = {part.sharding for part in (*found.plan.layers, found.plan.vocab)}
    assert sizes - {None} and not any(part.sharding for part in over_all.plan.layers)
    stock = Question.of(asked | {"trainer": "paddlenlp"}).search()
    assert stock_arguments(stock.plan)["sharding_parallel_degree"] == 8
    changes = {one.name: one for one in what_ifs(question, found.plan, [found.plan], SharedTime(20, MOST_CHANGES))}
    assert changes["ZeRO in parts"].time_s == pytest.approx(over_all.time_s)
