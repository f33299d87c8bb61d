"""A layer's times and memory under recompute of parts, LoRA and packed rows, derived from measured plain layers.

Figures of partial recompute that the profiles lack come from the model's arithmetic: bytes as a share of a layer's
measured activations, times as a share of the measured time of recomputing all of it. Frozen weights have no gradients
and no optimizer states, nothing of theirs is reduced or published, and backward computes one product for each of
forward's instead of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..base.units import FP32_BYTES
from ..model import Fused, ModelShape, Recompute, Split
from ..model.layer import apart
from ..plan.comm_points import GATHERS, CommPoint
from ..plan.strategy import Assumptions, Precision
from ..profiles.analytic import layer_numbers_per_token, recompute_saving_per_token, recompute_shares
from ..profiles.computation import PassTimes
from ..profiles.memory_use import MemoryUse

# Operations of matrix products in the time in which a byte is moved: of A100 144, of H100 277, in 16 bits and at the
# shares of the peaks of their data sheets.
FLOPS_PER_BYTE = 200.0
# The points that gather latents for these products.
GATHERED_AT = {
    "self_attn.q_b_proj.weight": CommPoint.LATENT_QUERY,
    "self_attn.kv_b_proj.weight": CommPoint.LATENT,
}
# A product with a factor is bound by memory: it takes as long as reading its input, or, of the second one, as writing
# its output, reading it with the projection's, and writing their sum. In 16 bits reading takes as long as a product of
# this rank: peak over bandwidth, each times its efficiency, 153 (A100) to 255 (H100) in the shipped data sheets.
LEAST_RANK = 200


class Partly(NamedTuple):
    """A layer that recomputes parts, for any number of samples."""

    parts: tuple[Recompute, ...]  # each by itself
    shares: Mapping[Recompute, float]  # of the time of recomputing all of the layer, where they were not measured
    spared: float  # share of the layer's activations that is not kept
    again_mib: float | None  # per sample; see `MemoryUse.recompute_peak_mib`

    def again_ms(self, times: PassTimes) -> float:
        """Time of the recompute, from the times of the layer's passes and of recomputing all of it."""
        shares = {**self.shares, **(times.shares or {})}
        whole_ms = times.forward_ms if times.recompute_ms is None else times.recompute_ms
        return whole_ms * sum([shares[part] for part in self.parts])


def partly(
    model: ModelShape, parts: Recompute, tp: int, memory: MemoryUse, layer_type: int, seq: int, assumed: Assumptions
) -> Partly:
    """The effect of recomputing these parts of a layer."""
    megatron, how = assumed.sequence_parallel, (assumed.mixed_precision, assumed.fused)
    spared_mib = memory.recompute_saving_mib(layer_type, parts, tp, seq, megatron)
    if spared_mib is None:
        spared = _spared_share(model, parts, seq, tp, megatron, *how)
    else:
        spared = min(spared_mib / memory.activation_mib(layer_type, tp, seq, megatron), 1.0)
    return Partly(
        apart(parts),
        recompute_shares(model, seq, *how, FLOPS_PER_BYTE),
        spared,
        memory.recompute_peak_mib(layer_type, parts, tp, seq, megatron),
    )


def made_numbers(model: ModelShape, tp: int) -> tuple[int, int]:
    """Numbers of the gradients that a layer's backward has made when it takes most memory, where a step has made none
    before: those of the MLP's last matrix; those of all of the MLP, where attention is computed again."""
    mlp = [weight for sublayer in model.block.sublayers if not sublayer.attends for weight in sublayer.weights]
    sizes = [weight.numbers_on(tp) for weight in mlp if weight.sharded]
    return sum(sizes[-1:]), sum(sizes)


@lru_cache(maxsize=10_000)
def _spared_share(
    model: ModelShape,
    parts: Recompute,
    seq: int,
    tp: int,
    sequence_parallel: bool,
    precision: Precision,
    fused: Fused,
) -> float:
    def size(numbers: float, scalars: float) -> float:
        return precision.bytes * numbers + FP32_BYTES * scalars

    arguments = (model, seq, tp, sequence_parallel, fused)
    return size(*recompute_saving_per_token(*arguments, parts)) / size(*layer_numbers_per_token(*arguments))


def frozen_times(times: PassTimes, products: float) -> PassTimes:
    """The times without gradients of weights; `products`: share of forward that weights are multiplied in."""
    return replace(times, backward_ms=max(times.backward_ms - products * times.forward_ms, 0.0))


def product_share(model: ModelShape, seq: int) -> float:
    """Share of a layer's operations that are products with weights; the others are attention's."""
    weights = 2 * model.layer_parameters
    return weights / (weights + seq / 2 * model.block.pair_flops)  # causal: half of all pairs of tokens


@lru_cache(maxsize=100)
def products_behind(model: ModelShape, seq: int) -> dict[CommPoint, float]:
    """Share of a layer's operations in the products behind each communication point that gathers tokens for them."""
    all_flops = 2 * model.layer_parameters + seq / 2 * model.block.pair_flops
    read = dict.fromkeys(GATHERS, 0)
    for sublayer in model.block.sublayers:
        into = CommPoint.INTO_ATTENTION if sublayer.attends else CommPoint.INTO_MLP
        for weight in sublayer.weights:
            if weight.linear and weight.split is Split.COLUMN:
                read[GATHERED_AT.get(weight.name, into)] += weight.numbers
    return {point: 2 * numbers / all_flops for point, numbers in read.items()}


def packed_times(times: PassTimes, products: float, seen: float) -> PassTimes:
    """The times where attention computes a share `seen` of the pairs of tokens that a causal row has; `products`: share
    of the operations that is not attention's."""
    share = products + (1 - products) * seen
    return replace(times, forward_ms=share * times.forward_ms, backward_ms=share * times.backward_ms)


def adapter_share(model: ModelShape, tp: int, rank: int, precision: Precision) -> float:
    """How long products with adapters take, as a share of those with the weights of the base, on one of `tp` ranks."""
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
