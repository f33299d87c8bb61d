"""Qwen2 and Qwen2.5, by PaddleNLP's own layers."""

from __future__ import annotations

from paddlenlp.transformers.qwen2.configuration import Qwen2Config
from paddlenlp.transformers.qwen2.modeling import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from .decoder import Adapter


class Qwen2(Adapter):
    config_class = Qwen2Config
    layer_class = Qwen2DecoderLayer
    norm_class = Qwen2RMSNorm
    model_class = Qwen2ForCausalLM
    rotary_class = Qwen2RotaryEmbedding
