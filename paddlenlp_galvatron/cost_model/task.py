"""Tasks that do not train all weights on rows of one document: adapters beside frozen weights, packed rows.

Frozen weights have no gradients and no optimizer states, nothing of theirs is reduced or published, and backward
computes one product for each of forward's instead of two.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..model import ModelShape, Split
from ..model.lora import factors_of
from ..plan.strategy import Precision
from ..profiles.computation import PassTimes
from .weights import StateBytes, Weights, weights_of

# A product with a factor is bound by memory: it takes as long as reading its input, or, of the second one, as writing
# its output, reading it with the projection's, and writing their sum. In 16 bits reading takes as long as a product of
# this rank: peak over bandwidth, each times its efficiency, 153 (A100) to 255 (H100) in the shipped data sheets.
LEAST_RANK = 200


@lru_cache(maxsize=256)
def adapter_weights(model: ModelShape, tp: int, rank: int) -> Weights:
    """The adapters of one decoder layer on one of `tp` ranks. All are unsharded, as vectors are."""
    own = weights_of(factors_of(model.block, rank), tp)
    return Weights(
        split_vectors=own.matrices,
        head_vectors=own.head_vectors,
        copied_vectors=own.copied_matrices,
        copies=own.copies,
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
