"""Fits the numbers of a data sheet to measured steps: measured runs, their predictions, the fit."""
