"""Explains a plan: its placement, time and memory, and how its prediction compares with what was measured.

`origin` finds the inputs of a plan's search, `facts` is the one record of a plan and its prediction. Questions:
`explain` with `why`, `difference`, `scaling`, `fit`, `search`, `measured`. Forms: `plan` and `trace`
as text and JSON, `page` and `what_if` as HTML.
"""

from .measured import Health, out_of_memory_report, predicted_beside_measured
from .plan import describe, notes

__all__ = ["Health", "describe", "notes", "out_of_memory_report", "predicted_beside_measured"]
