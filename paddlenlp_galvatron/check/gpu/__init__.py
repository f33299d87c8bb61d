"""Tries in minutes whether a node trains as it should: what `galvatron gpu-check` runs."""
