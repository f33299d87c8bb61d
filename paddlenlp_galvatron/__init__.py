"""Finds and runs the fastest parallel strategy for training a transformer with PaddleNLP, layer by layer."""

__version__ = "0.1.0"
