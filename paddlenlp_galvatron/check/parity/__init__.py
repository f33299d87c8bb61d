"""Parity: a plan trains what one process trains."""
