"""LoRA: on each projection of a layer two small factors that learn, while the weights themselves are frozen.

    projection          A [in, rank]                            B [rank, out]
    split by columns    whole on every rank, gradients are      split by columns
                        parts of one sum (OWN)
    split by rows       split by rows                           whole, gradients are parts of one sum
    whole (latents)     whole                                   whole

So x A B splits like x W and needs no collective beyond the projection's. Each routed expert has its own factors, which
its ranks hold and ZeRO shards like its weights; other factors are never sharded.
"""

from collections.abc import Iterator
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
    rslora: bool = False  # scale alpha / sqrt(rank), not alpha / rank
    base: str = ""  # which weights they are trained on: checksums, not a path

    @property
    def scaling(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def is_factor(name: str) -> bool:
    """Whether a weight's name is that of an adapter's factor."""
    return name.endswith(FACTORS)


@lru_cache(maxsize=16)
def adapted(kind: LayerKind, rank: int) -> LayerKind:
    """Layers of a kind with adapters on their projections."""
    return LayerKind((*kind.sublayers, *factors_of(kind, rank).sublayers))


@lru_cache(maxsize=16)
def factors_of(kind: LayerKind, rank: int) -> LayerKind:
    """The adapters alone: two factors on each projection's matrix."""
    return LayerKind((Sublayer("adapters", tuple(_factors(kind, rank))),))


def _factors(kind: LayerKind, rank: int) -> Iterator[Weight]:
    for weight in (weight for weight in kind.weights if weight.adapts):
        (inputs, outputs), split, expert = weight.shape, weight.split, weight.expert
        first, second = (f"{weight.name.removesuffix('.weight')}.{factor}" for factor in FACTORS)
        yield Weight(first, (inputs, rank), Split.OWN if split is Split.COLUMN else split, expert=expert)
        last = Split.OWN if split is Split.ROW else split
        yield Weight(second, (rank, outputs), last, weight.most_parts, expert=expert)
