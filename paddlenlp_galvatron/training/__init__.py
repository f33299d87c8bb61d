"""Trains a model by a plan: data, the training loop, and the proof that a plan trains what one process trains."""
