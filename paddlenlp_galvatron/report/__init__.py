"""Renders what the planner found, and how a prediction compares with what was measured. It searches nothing.

As text and JSON: `plan`, `search`, `explain`, `difference`, `scaling`, `fit`, `trace`, and `measured` with predicted.
As HTML: `page` and `what_if`.
"""
