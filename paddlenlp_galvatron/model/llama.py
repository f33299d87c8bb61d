"""Llama 1, 2 and 3."""

from __future__ import annotations

from .family import Family

LLAMA = Family(
    "llama",
    "Llama",
    "llama",
    biases=("attention_bias", "mlp_bias"),
    stock_shares_kv_heads=True,
    stock_ulysses=True,
    stock_recomputes_some=True,
)
