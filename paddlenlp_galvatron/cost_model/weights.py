"""How many weights a rank holds, by tensor-parallel degree. Formulas: PaddleNLP's Llama and Qwen2 decoder layers."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..plan.model import ModelShape


class Weights(NamedTuple):
    """Parameters on one rank of a tp group."""

    split: int  # matrices and biases, cut over the tp group (kv heads fewer than the degree: repeated)
    replicated: int  # norms (and biases added after a row-parallel product): whole on every rank

    @property
    def all(self) -> int:
        return self.split + self.replicated


def layer_weights(model: ModelShape, tp: int) -> Weights:
    """Weights of one decoder layer on one of `tp` ranks."""
    hidden, head = model.hidden_size, model.head_dim
    kv = max(model.kv_heads // tp, 1) * head
    q = hidden // tp
    matrices = hidden * (2 * q + 2 * kv + 3 * (model.intermediate_size // tp))
    biases = q + 2 * kv if model.family == "qwen2" else 0
    return Weights(matrices + biases, 2 * hidden)


def padded_vocab(model: ModelShape, tp: int) -> int:
    """Vocabulary rounded up to a multiple of the degree."""
    return ceil(model.vocab_size / tp) * tp


def table_weights(model: ModelShape, tp: int) -> int:
    """Weights of the embedding table, or of the LM head, on one of `tp` ranks."""
    return padded_vocab(model, tp) // tp * model.hidden_size


def kv_width(model: ModelShape, degree: int) -> int:
    """Columns of k (and of v) in a Ulysses exchange: kv heads fewer than the degree are repeated to reach it."""
    return max(model.kv_heads, degree) * model.head_dim
