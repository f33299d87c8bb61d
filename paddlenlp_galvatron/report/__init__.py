"""Explains a plan: who runs what, and how its prediction compares with what was measured."""

from .comparison import predicted_beside_measured
from .health import Health
from .out_of_memory import out_of_memory_report
from .plan import describe, notes

__all__ = ["Health", "describe", "notes", "out_of_memory_report", "predicted_beside_measured"]
