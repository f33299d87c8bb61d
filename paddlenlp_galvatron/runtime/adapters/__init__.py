"""One small adapter per model family: which of PaddleNLP's classes run it."""

from __future__ import annotations

from importlib import import_module

from ...model import TRAINED
from ...plan import UserError
from ..adapter import Adapter


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in TRAINED:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(TRAINED)}")
    family: Adapter = getattr(import_module(f".{name}", __name__), TRAINED[name].title)()
    return family
