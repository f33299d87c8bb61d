"""Runs models by PaddleNLP: one small adapter per dense family."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ...model.families import family_of

if TYPE_CHECKING:  # PaddleNLP's layers take seconds to import
    from .decoder import Adapter

# The class of each family's dense parts; experts are added for MoE families.
ADAPTERS = {
    "llama": "llama.Llama",
    "qwen2": "qwen2.Qwen2",
    "qwen3": "qwen2.Qwen3",
    "ernie4_5": "llama.Ernie",
    "ernie4_5_moe": "llama.Ernie",
    "qwen2_moe": "qwen2.Qwen2",
    "qwen3_moe": "qwen2.Qwen3",
    "mixtral": "llama.Llama",
    "glm4_moe": "qwen2.Glm4",
    "deepseek_v2": "deepseek.Deepseek",
    "deepseek_v3": "deepseek.Deepseek",
}


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    traits = family_of(name)
    module, _, dense = ADAPTERS[name].partition(".")
    bases = [getattr(import_module(f".{module}", __name__), dense)]
    if traits.mixture:
        bases.insert(0, import_module(".mixture", __name__).WithExperts)
    family: Adapter = type(traits.title, tuple(bases), {})()
    return family
