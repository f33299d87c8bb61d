"""Qwen1.5-MoE and Qwen2's models with experts: Qwen2's layers with experts in place of the MLP."""

from __future__ import annotations

from .mixture import WithExperts
from .qwen2 import Qwen2


class Qwen2Moe(WithExperts, Qwen2):
    pass
