"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from .family import Family

QWEN2 = Family("qwen2", "Qwen2", "qwen2", qkv_bias=True, heads_per_kv_head=2)
