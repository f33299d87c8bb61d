"""Finds and runs the fastest parallel strategy for training a transformer with PaddleNLP, layer by layer.

`fit`, `search`, `explain` and `PlanFile` plan in Python, without Paddle; `paddlenlp_galvatron.api` says more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import PlanFile, explain, fit, search
    from .base.errors import GalvatronError, Infeasible, UserError

__all__ = ["GalvatronError", "Infeasible", "PlanFile", "UserError", "__version__", "explain", "fit", "search"]
WHERE = dict.fromkeys(("PlanFile", "explain", "fit", "search"), ".api")
WHERE |= dict.fromkeys(("GalvatronError", "Infeasible", "UserError"), ".base.errors")


def __getattr__(name: str) -> Any:
    """Loaded when used: the command and training need none of it."""
    if name in WHERE:
        return getattr(import_module(WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
