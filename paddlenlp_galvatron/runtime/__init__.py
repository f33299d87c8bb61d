"""Executes a plan on Paddle process groups: groups, layers, redistribution, pipeline, gradients."""
