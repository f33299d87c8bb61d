"""Weights that a rank holds by tensor-parallel degree, and the bytes of their states by dtype and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..model import LayerKind, ModelShape, Split
from ..plan.strategy import DataParallel, Precision

FP32_BYTES = 4
MOMENT_BYTES = 2 * FP32_BYTES  # AdamW's two moments, fp32 with multi_precision


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter, unsharded."""

    weight: int
    gradient: int
    optimizer: int  # moments, and the fp32 master weight of a 16-bit one

    @classmethod
    def of(cls, precision: Precision, fp32_gradients: bool = False) -> StateBytes:
        """fp32: 4 + 4 + 8. 16-bit: 2 + 2 (4 when gradients are accumulated in fp32) + 4 + 8."""
        full = precision is Precision.FP32
        gradient = FP32_BYTES if full or fp32_gradients else precision.bytes
        return cls(precision.bytes, gradient, MOMENT_BYTES + (0 if full else FP32_BYTES))

    def held(self, dp_type: DataParallel, sharding: int, whole_gradients: bool) -> float:
        """Bytes per parameter that a rank keeps, its states sharded over `sharding` ranks.

        ZeRO-2 shards optimizer states and gradients, ZeRO-3 weights too; with `whole_gradients` (they are summed over
        micro-batches before they are reduced) gradients stay whole.
        """
        weight, gradient, optimizer = float(self.weight), float(self.gradient), float(self.optimizer)
        if dp_type is not DataParallel.DDP:
            optimizer /= sharding
            if not whole_gradients:
                gradient /= sharding
        if dp_type is DataParallel.ZERO3:
            weight /= sharding
        return weight + gradient + optimizer


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one module on one rank of a tp group. ZeRO shards the matrices; vectors stay whole everywhere."""

    matrices: int = 0
    split_vectors: int = 0  # biases in front of split columns
    whole_vectors: int = 0  # norms
    head_vectors: int = 0  # whole ones that a rank uses on heads of its own: norms of q and k
    copied_matrices: tuple[int, ...] = ()  # of the matrices, those that `copies` ranks of the tp group hold: kv heads
    copied_vectors: tuple[int, ...] = ()  # those of the split vectors
    copies: int = 1
    largest: int = 0  # of the matrices

    @property
    def vectors(self) -> int:
        return self.split_vectors + self.whole_vectors + self.head_vectors

    @property
    def all(self) -> int:
        return self.matrices + self.vectors


@lru_cache(maxsize=1024)
def weights_of(kind: LayerKind, tp: int) -> Weights:
    """Weights of a layer on one of `tp` ranks. Ranks beyond the kv heads share these; vocabularies are padded."""
    matrices = [weight for weight in kind.weights if weight.sharded]
    vectors = [weight for weight in kind.weights if not weight.sharded]
    shared = {weight for weight in kind.weights if weight.axis is not None and weight.parts(tp) < tp}

    def vectors_of(*splits: Split) -> int:
        return sum(vector.numbers_on(tp) for vector in vectors if vector.split in splits)

    return Weights(
        matrices=sum(matrix.numbers_on(tp) for matrix in matrices),
        split_vectors=vectors_of(Split.COLUMN, Split.ROW),
        whole_vectors=vectors_of(Split.WHOLE),
        head_vectors=vectors_of(Split.OWN),
        copied_matrices=tuple(matrix.numbers_on(tp) for matrix in matrices if matrix in shared),
        copied_vectors=tuple(vector.numbers_on(tp) for vector in vectors if vector in shared),
        copies=max((tp // weight.parts(tp) for weight in shared), default=1),
        largest=max((matrix.numbers_on(tp) for matrix in matrices), default=0),
    )


def layer_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of one decoder layer on one of `tp` ranks."""
    return weights_of(model.block, tp)


def table_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of the embedding on one of `tp` ranks."""
    return weights_of(model.embedding, tp)


def head_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of last norm and LM head on one of `tp` ranks."""
    return weights_of(model.head, tp)
