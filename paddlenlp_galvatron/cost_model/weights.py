"""How many weights a rank holds, by tensor-parallel degree. Shapes: PaddleNLP's Llama and Qwen2 decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..plan.model import ModelShape


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one module on one rank of a tp group. ZeRO shards the matrices; vectors stay whole everywhere."""

    matrices: int = 0
    split_vectors: int = 0  # biases in front of split columns
    whole_vectors: int = 0  # norms
    copied_matrices: int = 0  # those of the matrices that `copies` ranks of the tp group hold alike: shared kv heads
    copied_vectors: tuple[int, ...] = ()  # those of the split vectors
    copies: int = 1

    @property
    def vectors(self) -> int:
        return self.split_vectors + self.whole_vectors

    @property
    def all(self) -> int:
        return self.matrices + self.vectors


def layer_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of one decoder layer on one of `tp` ranks. Ranks beyond the kv heads share these."""
    hidden, q = model.hidden_size, model.hidden_size // tp
    copies = max(tp // model.kv_heads, 1)
    kv = model.kv_heads * copies // tp * model.head_dim
    biased = model.family == "qwen2"
    return Weights(
        matrices=hidden * (2 * q + 2 * kv + 3 * (model.intermediate_size // tp)),
        split_vectors=q + 2 * kv if biased else 0,
        whole_vectors=2 * hidden,
        copied_matrices=2 * hidden * kv if copies > 1 else 0,
        copied_vectors=(kv, kv) if biased and copies > 1 else (),
        copies=copies,
    )


def table_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of the embedding on one of `tp` ranks, its vocabulary padded to a multiple of the degree."""
    return Weights(matrices=ceil(model.vocab_size / tp) * model.hidden_size)


def head_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of last norm and LM head on one of `tp` ranks."""
    return Weights(matrices=table_weights(model, tp).matrices, whole_vectors=model.hidden_size)


def kv_width(model: ModelShape, degree: int) -> int:
    """Columns of k (and of v) in a Ulysses exchange: kv heads fewer than the degree are repeated to reach it."""
    return max(model.kv_heads, degree) * model.head_dim
