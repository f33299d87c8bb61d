"""How PaddleNLP runs a model: one small adapter per dense family."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ...base.errors import UserError
from ...model import FAMILIES

if TYPE_CHECKING:  # PaddleNLP's layers take seconds to import
    from .decoder import Adapter

DENSE = {  # families with experts in place of the MLP: the module of their other parts
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen3",
    "mixtral": "llama",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
}


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    dense = DENSE.get(name, name)
    bases = [getattr(import_module(f".{dense}", __name__), dense.title())]
    if dense != name:
        bases.insert(0, import_module(".mixture", __name__).WithExperts)
    family: Adapter = type(FAMILIES[name].title, tuple(bases), {})()
    return family
