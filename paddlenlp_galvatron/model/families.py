"""All families, by their `model_type` in config.json."""

from __future__ import annotations

from .family import Family
from .llama import LLAMA
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, MIXTRAL)}
