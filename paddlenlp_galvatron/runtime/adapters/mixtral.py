"""Mixtral: Llama's layers with experts in place of the MLP."""

from __future__ import annotations

from .llama import Llama
from .mixture import WithExperts


class Mixtral(WithExperts, Llama):
    pass
