"""Qwen3, by PaddleNLP's layers of Qwen2 with norms behind q and k."""

from __future__ import annotations

from copy import copy
from typing import Any

from paddlenlp.transformers.qwen2.modeling import Qwen2RMSNorm

from ...model import ModelShape
from .qwen2 import Qwen2


class HeadNorm(Qwen2RMSNorm):  # type: ignore[misc]
    """RMSNorm of each head: [..., N * D] -> [..., N * D], for any number of heads N."""

    def __init__(self, shape: ModelShape, config: Any):
        config = copy(config)
        config.hidden_size = shape.head_dim
        super().__init__(config)

    def forward(self, x: Any) -> Any:
        return super().forward(x.reshape([*x.shape[:-1], -1, self.hidden_size])).reshape(x.shape)


class Qwen3(Qwen2):
    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        if not shape.normed_heads:
            return
        attention = layer.self_attn
        attention.q_norm, attention.k_norm = HeadNorm(shape, config), HeadNorm(shape, config)
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            projection.register_forward_post_hook(lambda _layer, _inputs, heads, norm=norm: norm(heads))
