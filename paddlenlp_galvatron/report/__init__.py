"""Explains a plan: layer placement, and how its prediction compares with what was measured."""

from .measured import Health, out_of_memory_report, predicted_beside_measured
from .plan import describe, notes

__all__ = ["Health", "describe", "notes", "out_of_memory_report", "predicted_beside_measured"]
