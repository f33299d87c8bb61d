"""Llama, by PaddleNLP's own layers."""

from __future__ import annotations

from typing import Any

from paddlenlp.transformers.llama.configuration import LlamaConfig
from paddlenlp.transformers.llama.modeling import (
    Llama3RotaryEmbedding,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ...model import ModelShape
from .decoder import Adapter


class Llama(Adapter):
    config_class = LlamaConfig
    layer_class = LlamaDecoderLayer
    norm_class = LlamaRMSNorm
    model_class = LlamaForCausalLM
    rotary_class = LlamaRotaryEmbedding

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        if not shape.rope_scaling:
            return super()._rotary(shape, positions)
        scaling = {name: value for name, value in shape.rope_scaling if name != "rope_type"}
        return Llama3RotaryEmbedding(shape.head_dim, positions, shape.rope_theta, **scaling)
