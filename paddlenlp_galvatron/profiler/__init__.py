"""Measures hardware and model with Paddle and writes the profile files."""
