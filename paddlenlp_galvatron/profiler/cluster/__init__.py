"""Measures the network and what runs at once on it."""
