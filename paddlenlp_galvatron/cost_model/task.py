"""Tasks that do not train all weights on rows of one document: adapters beside frozen weights, packed rows.

Frozen weights have no gradients and no optimizer states, nothing of theirs is reduced or published, and backward
computes one product for each of forward's instead of two.
"""

from __future__ import annotations

from dataclasses import replace

from ..model import ModelShape, Split
from ..plan.strategy import Precision
from ..profiles.computation import PassTimes
from .costs import LayerCost, Workspace
from .states import StateBytes
from .weights import Weights

# A product with a factor is bound by memory: it takes as long as reading its input, or, of the second one, as writing
# its output, reading it with the projection's, and writing their sum. In 16 bits reading takes as long as a product of
# this rank: peak over bandwidth, each times its efficiency, 153 (A100) to 255 (H100) in the shipped data sheets.
LEAST_RANK = 200


def adapted(model: ModelShape) -> int:
    """Projections of one decoder layer, each of which has an adapter."""
    return sum(weight.linear for weight in model.block.weights)


def adapter_weights(model: ModelShape, tp: int, rank: int) -> Weights:
    """The adapters of one decoder layer on one of `tp` ranks: into the rank, out of the rank.

    A projection split by columns splits the second factor, one split by rows the first; the other factor is whole on
    every rank, its gradient summed over the stage. Both are unsharded, as vectors are.
    """
    ends = [
        weight.shape if weight.split is Split.COLUMN else weight.shape[::-1]
        for weight in model.block.weights
        if weight.linear
    ]
    return Weights(
        0,
        split_vectors=rank * sum(split for _, split in ends) // tp,
        head_vectors=rank * sum(whole for whole, _ in ends),
    )


def frozen_states(states: StateBytes) -> StateBytes:
    """Bytes of a frozen weight."""
    return StateBytes(states.weight, 0, 0)


def frozen_times(times: PassTimes, products: float) -> PassTimes:
    """The times without gradients of weights; `products`: share of forward that weights are multiplied in."""
    return replace(times, backward_ms=max(times.backward_ms - products * times.forward_ms, 0.0))


def product_share(model: ModelShape, seq: int) -> float:
    """Share of a layer's operations that are products with weights; the others are attention's."""
    weights = 2 * model.layer_parameters
    return weights / (weights + seq / 2 * model.block.pair_flops)  # causal: half of all pairs of tokens


def packed_times(times: PassTimes, products: float, seen: float) -> PassTimes:
    """The times where attention computes a share `seen` of the pairs of tokens that a causal row has; `products`: share
    of the operations that is not attention's."""
    share = products + (1 - products) * seen
    return replace(times, forward_ms=share * times.forward_ms, backward_ms=share * times.backward_ms)


def adapter_share(model: ModelShape, tp: int, rank: int, precision: Precision) -> float:
    """How long products with adapters take, as a share of those with the weights beside them, on one of `tp` ranks."""
    least = 0 if precision is Precision.FP32 else LEAST_RANK
    adapters = weights = 0.0
    for weight in model.block.weights:
        if weight.linear:
            into, out = (
                each / (tp if split is weight.split else 1)
                for each, split in zip(weight.shape, (Split.ROW, Split.COLUMN), strict=True)
            )
            adapters += max(rank, least) * into + max(rank, 4 * least) * out
            weights += into * out
    return adapters / weights


def together(one: LayerCost, other: LayerCost) -> LayerCost:
    """Two modules that a layer passes one after the other."""
    return LayerCost.of(
        one.terms.also(other.terms),
        one.activation_mib + other.activation_mib,
        Workspace.of((one.workspace, other.workspace)),
    )
