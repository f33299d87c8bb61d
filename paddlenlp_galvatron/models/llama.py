"""Llama, by PaddleNLP's own layers."""

from __future__ import annotations

from paddlenlp.transformers.llama.configuration import LlamaConfig
from paddlenlp.transformers.llama.modeling import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .decoder import DecoderFamily


class Llama(DecoderFamily):
    config_class = LlamaConfig
    layer_class = LlamaDecoderLayer
    norm_class = LlamaRMSNorm
    model_class = LlamaForCausalLM
    rotary_class = LlamaRotaryEmbedding
