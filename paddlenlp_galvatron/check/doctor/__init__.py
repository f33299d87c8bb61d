"""Whether this machine is fit to plan and to train: one finding a subject, with its remedy."""

from .checks import examine
from .finding import State
from .machine import Machine

__all__ = ["Machine", "State", "examine"]
