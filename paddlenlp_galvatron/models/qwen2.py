"""Qwen2 and Qwen2.5, by PaddleNLP's own layers."""

from __future__ import annotations

from paddlenlp.transformers.qwen2.configuration import Qwen2Config
from paddlenlp.transformers.qwen2.modeling import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2RMSNorm

from .decoder import DecoderFamily


class Qwen2(DecoderFamily):
    name = prefix = "qwen2"
    config_class = Qwen2Config
    layer_class = Qwen2DecoderLayer
    norm_class = Qwen2RMSNorm
    model_class = Qwen2ForCausalLM
