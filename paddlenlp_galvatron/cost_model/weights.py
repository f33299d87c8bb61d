"""How many weights a rank holds, by tensor-parallel degree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..model import LayerKind, ModelShape, Split


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
