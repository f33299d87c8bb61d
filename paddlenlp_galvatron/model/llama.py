"""Llama 1, 2 and 3."""

from __future__ import annotations

from .family import Family

LLAMA = Family(
    "llama",
    "Llama",
    "llama",
    biases=("attention_bias", "mlp_bias"),
    # Llama 3.1 to 3.3: long waves are slowed by the factor, short ones are left, those between are mixed.
    rope_types={"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")},
    stock_shares_kv_heads=True,
    stock_ulysses=True,
    stock_recomputes_some=True,
)
