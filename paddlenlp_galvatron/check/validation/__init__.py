"""Compares predictions with real steps: draws plans, runs and measures them."""
