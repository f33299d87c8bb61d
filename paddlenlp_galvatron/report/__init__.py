"""Renders the planner's results, and comparisons of predictions with measurements. It searches nothing.

As text and JSON: `plan`, `search`, `explain`, `difference`, `scaling`, `fit`, `trace`, and `measured` with predicted.
As HTML: `page` and `what_if`.
"""
