"""The base of every package: errors, reading foreign files, writing durable ones. It imports no other package."""

from .errors import GalvatronError, Infeasible, UserError

__all__ = ["GalvatronError", "Infeasible", "UserError"]
