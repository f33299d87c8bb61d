"""All families, by their `model_type` in config.json."""

from __future__ import annotations

from .family import Family
from .llama import LLAMA
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3)}
