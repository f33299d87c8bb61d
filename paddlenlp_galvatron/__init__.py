"""Finds and runs the fastest parallel strategy for training a transformer with PaddleNLP, layer by layer.

`fit`, `search`, `explain` and `Plan` plan in Python, without Paddle; `paddlenlp_galvatron.api` says more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Plan, explain, fit, search

__version__ = "0.1.0"
__all__ = ["Plan", "explain", "fit", "search"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the command and training need none of it."""
    if name in __all__:
        return getattr(import_module(".api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
