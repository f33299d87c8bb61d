"""Holds the cost model against real steps: draws plans, runs them, compares."""
