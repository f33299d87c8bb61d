"""Qwen2 and Qwen2.5, Qwen3, and GLM-4.5 without its experts, by PaddleNLP's layers of Qwen2."""

from copy import copy
from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddlenlp.transformers.qwen2 import modeling
from paddlenlp.transformers.qwen2.configuration import Qwen2Config

from ...model import ModelShape
from .decoder import Adapter


class Qwen2(Adapter):
    config_class = Qwen2Config
    layer_class = modeling.Qwen2DecoderLayer
    norm_class = modeling.Qwen2RMSNorm
    model_class = modeling.Qwen2ForCausalLM
    rotary_class = modeling.Qwen2RotaryEmbedding


class HeadNorm(modeling.Qwen2RMSNorm):  # type: ignore[misc]
    """RMSNorm of each head: [..., N * D] -> [..., N * D], for any number of heads N."""

    def __init__(self, shape: ModelShape, config: Any):
        config = copy(config)
        config.hidden_size = shape.head_dim
        super().__init__(config)

    def forward(self, x: Any) -> Any:
        return super().forward(x.reshape([*x.shape[:-1], -1, self.hidden_size])).reshape(x.shape)


class Qwen3(Qwen2):
    """Qwen2 with norms after q and k."""

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        if not shape.normed_heads:
            return
        attention = layer.self_attn
        attention.q_norm, attention.k_norm = HeadNorm(shape, config), HeadNorm(shape, config)
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            projection.register_forward_post_hook(lambda _layer, _inputs, heads, norm=norm: norm(heads))


class Glm4(Qwen3):
    """Rotary positions rotate only the first elements of a head; PaddleNLP's rotate pairs across the halves. Scores are
    equal if q and k are reordered for this and the other elements are rotated by an angle of 0."""

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_post_hook(partial(_into_halves, shape.head_dim, shape.rotary_dim))

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        return PartialPositions(self.rotary_class(shape.rotary_dim, positions, shape.rope_theta), shape.head_dim)


class PartialPositions(nn.Layer):  # type: ignore[misc]
    """Extends a table of rotary positions of a head's first elements, [1, S, 1, R], to whole heads, [1, S, 1, D]."""

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
    """[..., N * D] -> the same with half of the rotated and half of the other elements in each half of a head."""
    sizes = [turned // 2] * 2 + [(width - turned) // 2] * 2
    first, second, *others = heads.reshape([*heads.shape[:-1], -1, width]).split(sizes, -1)
    return paddle.concat([first, others[0], second, others[1]], -1).reshape(heads.shape)
