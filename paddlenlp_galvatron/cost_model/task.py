"""Tasks that do not train all weights of one model: adapters beside frozen weights, a frozen model beside.

Planned only: the runtime trains all weights. Frozen weights have no gradients and no optimizer states, nothing of
theirs is reduced or published, and backward computes one product for each of forward's instead of two.
"""

from __future__ import annotations

from dataclasses import replace

from ..model import ModelShape, Split
from ..profiles.computation import PassTimes
from .costs import LayerCost, States, Terms
from .states import StateBytes
from .weights import Weights


def adapted(model: ModelShape) -> int:
    """Projections of one decoder layer, each of which has an adapter."""
    return sum(weight.linear for weight in model.block.weights)


def adapter_weights(model: ModelShape, tp: int, rank: int) -> Weights:
    """The adapters of one decoder layer on one of `tp` ranks: into the rank, out of the rank.

    A projection split by columns splits the second factor, one split by rows the first; the other factor is whole on
    every rank and counts as vectors do: unsharded, its gradient summed over the stage.
    """
    ends = [
        weight.shape if weight.split is Split.COLUMN else weight.shape[::-1]
        for weight in model.block.weights
        if weight.linear
    ]
    return Weights(
        matrices=rank * sum(split for _, split in ends) // tp, whole_vectors=rank * sum(whole for whole, _ in ends)
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


def together(one: LayerCost, other: LayerCost) -> LayerCost:
    """Two modules that a layer passes one after the other."""
    return LayerCost.of(
        one.terms.also(other.terms),
        one.activation_mib + other.activation_mib,
        max(one.working_mib, other.working_mib),
    )


def with_reference(cost: LayerCost, frozen: LayerCost, copies: bool) -> LayerCost:
    """The cost with a frozen model's pass forward before it, which keeps nothing; `copies`: it has own weights."""
    terms = frozen.terms
    beside = Terms(
        terms.states if copies else States(),
        terms.forward_ms,
        tensor_forward_ms=terms.tensor_forward_ms,
        gather_forward_ms=terms.gather_forward_ms,
    )
    return together(cost, LayerCost.of(beside, 0.0, frozen.working_mib))
