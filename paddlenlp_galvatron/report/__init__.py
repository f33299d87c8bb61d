"""Renders the planner's results, and comparisons of predictions with measurements. It searches nothing.

As text and JSON: `plan`, `search`, `explain`, `difference`, `fit`, `trace`, and `measured` with predicted.
As HTML: `page`.
"""
