"""Compares predictions with real steps: draws plans, runs them, measures."""
