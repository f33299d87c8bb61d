"""Qwen1.5-MoE and Qwen2's models with experts, one of which has all tokens."""

from __future__ import annotations

from .family import Family, Mixture

QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2Moe",
    "qwen2",
    qkv_bias=True,
    mixture=Mixture(shared=True),
    stock=False,  # PaddleNLP 3.0.0b4's own fails on Paddle 3.3.1
    heads_per_kv_head=2,
)
