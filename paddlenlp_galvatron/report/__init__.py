"""Explains a plan: who runs what, and how its prediction compares with what was measured."""

from .comparison import predicted_beside_measured
from .plan import describe, notes

__all__ = ["describe", "notes", "predicted_beside_measured"]
