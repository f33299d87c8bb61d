"""Renders what the planner found, and how a prediction compares with what was measured. It searches nothing.

As text and JSON: `plan`, `search`, `explain`, `difference`, `scaling`, `fit`, `trace`, and `measured` beside predicted.
As HTML: `page` and `what_if`.
"""

from .measured import Health, out_of_memory_report, predicted_beside_measured
from .plan import describe, notes

__all__ = ["Health", "describe", "notes", "out_of_memory_report", "predicted_beside_measured"]
