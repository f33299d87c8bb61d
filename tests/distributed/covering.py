"""Few plans that hold nearly every pair of features: a fault in the runtime hides in one feature, or where two meet.

Pairwise testing: D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software Fault Interactions and Implications for Software
Testing", IEEE Transactions on Software Engineering 30(6), 2004.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise

from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Recompute, VocabStrategy

from .plans import EVERY, Named

SHARE = 0.85  # of the pairs; the others need twice as many plans again
LATE = 0.6  # of the pairs of 2 and of 4 ranks: plans that train by the deferred backend, and by gloo at night alone


def covering(cases: Sequence[Named], share: float = SHARE) -> list[Named]:
    """Cases that hold a share of the pairs that all of them hold, greedily: the most new pairs a rank come first."""
    pairs = {case.name: pairs_of(case) for case in cases}
    assert len(pairs) == len(cases), "each case has a name of its own"
    every = set().union(*pairs.values())
    held: set[object] = set()
    chosen: list[Named] = []
    while len(held) < share * len(every):
        chosen.append(max(cases, key=lambda case: len(pairs[case.name] - held) / case.plan.world_size))
        held |= pairs[chosen[-1].name]
    return [case for case in cases if case in chosen]


@cache
def chosen() -> tuple[list[Named], list[Named]]:
    """The plans that `make test` trains: by gloo, and by the deferred backend, which asks for more."""
    every = covering(EVERY)
    late = [case for ranks in (2, 4) for case in covering([one for one in every if one.plan.world_size == ranks], LATE)]
    return [case for case in every if case not in late], late


def pairs_of(case: Named) -> set[object]:
    """Pairs of features of the plan, of the plan and a layer, and of one layer; layouts next to each other."""
    plan, whole, kv_heads = case.plan, set(_whole(case)), case.kv_heads or 0
    pairs: set[object] = {frozenset(pair) for pair in combinations(whole, 2)}
    for index, layer in enumerate(plan.layers):
        features = {f"layer {feature}" for feature in _layer(layer, plan.default_dp_type)}
        features |= {"layer dense"} if index in case.dense else set()
        features |= {f"layer {kv_heads} kv heads on {layer.tp} ranks"} if layer.tp > kv_heads > 0 else set()
        pairs |= {frozenset(pair) for pair in combinations(features, 2)}
        pairs |= {frozenset((feature, other)) for feature in features for other in whole}
    return pairs | set(pairwise(map(_layout, plan.layers)))


def _whole(case: Named) -> Iterator[str]:
    plan = case.plan
    yield case.family
    yield case.optimizer
    yield f"{plan.stage_size} ranks a stage"
    yield f"{min(plan.pipeline, 3)} stages, {min(plan.chunks, 2)} chunks, {plan.schedule.value}"
    yield f"micro-batches {(plan.micro_batches > plan.pipeline) - (plan.micro_batches < plan.pipeline)}"
    yield plan.assumed.mixed_precision.value
    yield f"default {plan.default_dp_type.value}"
    yield from (f"vocabulary {feature}" for feature in _layer(plan.vocab, plan.default_dp_type))
    flags = {
        "tied": case.tied,
        "MTP": case.mtp,
        "plain tp": not plan.assumed.sequence_parallel,
        "reduced every micro-batch": not plan.assumed.async_grad_reduce,
        "uneven stages": len(set(plan.stages)) > 1,
    }
    yield from (name for name, holds in flags.items() if holds)


def _layer(layer: LayerStrategy | VocabStrategy, default: DataParallel) -> Iterator[str]:
    flags = {
        "tp": layer.tp > 1,
        "ulysses": layer.ulysses,
        "cp": layer.context > 1,
        "zero": layer.dp_type is not default,
        "zero in a part": layer.sharding is not None,
    }
    if isinstance(layer, LayerStrategy):
        flags |= {
            "strided": not layer.consecutive,
            "ep": layer.ep > 1,
            "etp": layer.etp > 1,
            "experts' zero": layer.experts_dp_type not in (None, default),
        }
        yield from (f"recompute {part.name}" for part in Recompute if part and part in layer.recompute)
    yield from (name for name, holds in flags.items() if holds)


def _layout(layer: LayerStrategy) -> tuple[object, ...]:
    return layer.tp > 1, layer.ulysses, layer.context > 1, layer.consecutive, layer.ep > 1, layer.etp > 1
