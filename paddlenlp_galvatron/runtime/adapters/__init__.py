"""One small adapter per dense model family: which of PaddleNLP's classes run it."""

from __future__ import annotations

from importlib import import_module

from ...model import FAMILIES
from ...plan import UserError
from ..adapter import Adapter

DENSE = {"qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "mixtral": "llama"}  # with experts in place of the MLP


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    dense = DENSE.get(name, name)
    bases = [getattr(import_module(f".{dense}", __name__), FAMILIES[dense].title)]
    if dense != name:
        bases.insert(0, import_module(".mixture", __name__).WithExperts)
    family: Adapter = type(FAMILIES[name].title, tuple(bases), {})()
    return family
