"""Trains a model by a plan: data, the training loop and checkpoints."""
