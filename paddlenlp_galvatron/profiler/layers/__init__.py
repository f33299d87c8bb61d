"""Measures time and memory of a model's parts."""
