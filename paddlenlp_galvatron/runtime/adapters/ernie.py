"""ERNIE-4.5 without its experts, by PaddleNLP's layers of Llama.

Rotary positions turn neighbouring numbers of a head here, and numbers half a head apart in Llama. Both give the same
scores of attention once the numbers of each head of q and k are sorted in one way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...model import ModelShape
from .llama import Llama


def _by_halves(width: int, _layer: Any, _inputs: Any, heads: Any) -> Any:
    """Sort each head: first numbers of all pairs, then second ones; [..., N * D] for any number of heads N."""
    return heads.reshape([*heads.shape[:-1], -1, width // 2, 2]).swapaxes(-1, -2).reshape(heads.shape)


class Ernie(Llama):
    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_post_hook(partial(_by_halves, shape.head_dim))
