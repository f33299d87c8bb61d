"""What every room stands on: errors, reading what others wrote, writing what lasts. Imports nothing of ours."""

from .errors import GalvatronError, Infeasible, UserError

__all__ = ["GalvatronError", "Infeasible", "UserError"]
