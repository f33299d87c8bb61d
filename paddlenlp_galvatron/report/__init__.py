"""Renders the planner's results, and comparisons of predictions with measurements. Runs no searches.

As text and JSON: `plan`, `search`, `explain`, `difference`, `fit`, `trace`, and `measured` with predicted.
As HTML: `page`.
"""
