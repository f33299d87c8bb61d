"""Mixtral."""

from __future__ import annotations

from .family import Family, Mixture

MIXTRAL = Family(
    "mixtral",
    "Mixtral",
    "llama",  # its layers are Llama's but for the experts
    mixture=Mixture("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", "num_local_experts", normed=True),
    window="sliding_window",
    stock=False,  # PaddleNLP 3.0.0b4's own fails on Paddle 3.3.1
    heads_per_kv_head=2,
)
