"""Qwen3's models with experts."""

from __future__ import annotations

from .family import Family, Mixture

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    "qwen2",  # as Qwen3: PaddleNLP's Qwen2 with norms of q and k
    qk_norm=True,
    biases=("attention_bias",),
    mixture=Mixture(),
    stock=False,
    heads_per_kv_head=2,
    example={"own_head_dim": 16},
)
