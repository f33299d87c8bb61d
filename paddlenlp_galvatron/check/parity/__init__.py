"""Parity: training by a plan equals training in one process."""
