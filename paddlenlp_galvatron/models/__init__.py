"""One small adapter per model family: what is embedding, block and head, and how the weights are called."""

from __future__ import annotations

from importlib import import_module

from ..plan import UserError
from ..runtime.family import Family

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2"}  # module -> class


def load_family(name: str) -> Family:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    family: Family = getattr(import_module(f".{name}", __name__), FAMILIES[name])()
    return family
