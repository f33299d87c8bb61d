"""Qwen3, the dense ones: heads of a size of their own, and a norm on each head of q and k."""

from __future__ import annotations

from .family import Family

QWEN3 = Family(
    "qwen3",
    "Qwen3",
    "qwen2",  # PaddleNLP 3.0.0b4 has no Qwen3: its Qwen2 is one with those norms
    qk_norm=True,
    biases=("attention_bias",),
    stock=False,
    heads_per_kv_head=2,
    example={"own_head_dim": 16},
)
