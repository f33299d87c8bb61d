"""One small adapter per model family: which of PaddleNLP's classes run it."""

from __future__ import annotations

from importlib import import_module

from ...model import FAMILIES
from ...plan import UserError
from ..adapter import Adapter


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    family: Adapter = getattr(import_module(f".{name}", __name__), FAMILIES[name].title)()
    return family
