"""The parts of `galvatron gpu-check`, which tests in minutes whether a node trains correctly."""
