"""LoRA: beside each projection of a layer two small factors that learn, while the weights themselves are frozen.

    projection          A [in, rank]                            B [rank, out]
    split by columns    whole on every rank, gradients are      split by columns
                        parts of one sum (OWN)
    split by rows       split by rows                           whole, gradients are parts of one sum

So x A B splits as x W does, and what it adds goes through the seam of the projection: no collective more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from .layer import LayerKind, Split, Sublayer, Weight

FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Adapters:
    """The adapters of all projections of all decoder layers."""

    rank: int
    alpha: float
    rslora: bool = False  # the product counts alpha / sqrt(rank), not alpha / rank
    base: str = ""  # which weights they are trained on: checksums, not a path

    @property
    def scaling(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def is_factor(name: str) -> bool:
    """Whether a weight's name is that of an adapter's factor."""
    return name.endswith(FACTORS)


@lru_cache(maxsize=16)
def adapted(kind: LayerKind, rank: int) -> LayerKind:
    """Layers of a kind with adapters beside their projections."""
    return LayerKind((*kind.sublayers, *factors_of(kind, rank).sublayers))


@lru_cache(maxsize=16)
def factors_of(kind: LayerKind, rank: int) -> LayerKind:
    """The adapters alone."""
    return LayerKind((Sublayer("adapters", tuple(one for weight in kind.weights for one in factors(weight, rank))),))


def factors(weight: Weight, rank: int) -> tuple[Weight, ...]:
    """The factors beside a weight: none unless it is a projection's matrix."""
    if not weight.linear:
        return ()
    (inputs, outputs), column = weight.shape, weight.split is Split.COLUMN
    names = (f"{weight.name.removesuffix('.weight')}.{factor}" for factor in FACTORS)
    first, second = names
    return (
        Weight(first, (inputs, rank), Split.OWN if column else weight.split),
        Weight(second, (rank, outputs), weight.split if column else Split.OWN, weight.most_parts if column else None),
    )
