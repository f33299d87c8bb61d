"""GLM-4.5 without its experts, by PaddleNLP's layers of Qwen2."""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
from paddle import nn

from ...model import ModelShape
from .qwen3 import Qwen3


class Glm4(Qwen3):
    """Rotary positions turn the first numbers of a head alone, PaddleNLP's a number of either half. Scores are equal
    if both q and k are reordered so, and the numbers that stay are turned by an angle of 0."""

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_post_hook(partial(_into_halves, shape.head_dim, shape.rotary_dim))

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        return PartialPositions(self.rotary_class(shape.rotary_dim, positions, shape.rope_theta), shape.head_dim)


class PartialPositions(nn.Layer):  # type: ignore[misc]
    """A table of the rotary positions of a head's first numbers, [1, S, 1, R], as one of whole heads, [1, S, 1, D]."""

    def __init__(self, table: Any, head_dim: int):
        super().__init__()
        self._table, self._head_dim = table, head_dim

    def forward(self, x: Any, seq_len: int) -> Any:
        """(cosines, sines), each [1, S, 1, D]."""
        cosines, sines = self._table(x, seq_len=seq_len)
        rest = [*cosines.shape[:-1], (self._head_dim - cosines.shape[-1]) // 2]
        parts = (cosines, paddle.ones(rest, cosines.dtype)), (sines, paddle.zeros(rest, sines.dtype))
        return tuple(paddle.concat([turned.chunk(2, -1)[0], fixed] * 2, -1) for turned, fixed in parts)


def _into_halves(width: int, turned: int, _layer: Any, _inputs: Any, heads: Any) -> Any:
    """[..., N * D] -> the same with half of the turned and half of the other numbers in each half of a head."""
    sizes = [turned // 2] * 2 + [(width - turned) // 2] * 2
    first, second, *others = heads.reshape([*heads.shape[:-1], -1, width]).split(sizes, -1)
    return paddle.concat([first, others[0], second, others[1]], -1).reshape(heads.shape)
