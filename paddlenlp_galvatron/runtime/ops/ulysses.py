"""Ulysses at the communication points: tokens are exchanged for heads in front of attention, and back behind it."""

from __future__ import annotations

from typing import Any

from ...plan.comm_points import Op
from ..collectives import all_to_all


def _to_heads(x: Any, group: Any) -> Any:
    """[T, n·C], own tokens of all heads -> [T·n, C], all tokens of own heads."""
    tokens, width = x.shape
    by_rank = x.reshape([tokens, group.nranks, width // group.nranks]).transpose([1, 0, 2])
    return all_to_all(by_rank.reshape([tokens * group.nranks, -1]), group)


def _to_tokens(x: Any, group: Any) -> Any:
    """[T·n, C] -> [T, n·C]."""
    tokens = x.shape[0] // group.nranks
    by_rank = all_to_all(x, group).reshape([group.nranks, tokens, -1])
    return by_rank.transpose([1, 0, 2]).reshape([tokens, -1])


OPS = {Op.TO_HEADS: (_to_heads, _to_tokens), Op.TO_TOKENS: (_to_tokens, _to_heads)}
