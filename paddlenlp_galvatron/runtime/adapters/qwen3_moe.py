"""Qwen3's models with experts: Qwen3's layers with experts in place of the MLP."""

from __future__ import annotations

from .mixture import WithExperts
from .qwen3 import Qwen3


class Qwen3Moe(WithExperts, Qwen3):
    pass
