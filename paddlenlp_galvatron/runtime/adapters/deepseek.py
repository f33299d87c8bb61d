"""DeepSeek-V2 and V3 without their experts, by PaddleNLP's own layers."""

from copy import copy
from functools import partial
from typing import Any

from paddle import nn
from paddlenlp.transformers.deepseek_v2 import modeling
from paddlenlp.transformers.deepseek_v2.configuration import DeepseekV2Config
from paddlenlp.transformers.llama.modeling import LlamaRMSNorm, LlamaRotaryEmbedding

from ...model import ModelShape
from ..kernels import PLAIN, Kernels
from .decoder import Adapter

LATENT_EPSILON = 1e-6  # of MLA's latent norms in transformers, independent of rms_norm_eps


class Deepseek(Adapter):
    config_class = DeepseekV2Config
    layer_class = partial(modeling.DeepseekV2DecoderLayer, layer_idx=0)  # a dense one
    norm_class = LlamaRMSNorm  # PaddleNLP's DeepSeek has no fused one, and 1e-6 for every rms_norm_eps
    model_class = modeling.DeepseekV2ForCausalLM

    def config(self, shape: ModelShape, seq_length: int, kernels: Kernels = PLAIN) -> Any:
        config = super().config(shape, seq_length, kernels)
        config.n_routed_experts = None  # experts are put in afterwards
        config.use_fused_rope = False
        config.rope_scaling = {**dict(shape.rope_scaling), "type": "yarn"} if shape.rope_scaling else None
        return config

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        layer = super().decoder_layer(shape, config)
        layer.input_layernorm, layer.post_attention_layernorm = LlamaRMSNorm(config), LlamaRMSNorm(config)
        attention, latents = layer.self_attn, shape.latents
        assert latents
        attention.kv_a_layernorm = _latent_norm(config, latents.kv_lora_rank)
        if latents.q_lora_rank:
            attention.q_a_layernorm = _latent_norm(config, latents.q_lora_rank)
        attention.rotary_emb = Positions(attention.rotary_emb, flat=False)
        return layer

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        model = super().whole_model(shape, config)
        for norm in model.sublayers():
            if type(norm) is type(model.deepseek_v2.norm) and norm.hidden_size == shape.hidden_size:
                norm.variance_epsilon = shape.rms_norm_eps
        return model

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        if not shape.rope_scaling:
            return Positions(LlamaRotaryEmbedding(shape.rotary_dim, positions, shape.rope_theta), flat=True)
        scaling = {name: value for name, value in shape.rope_scaling if name not in ("rope_type", "factor")}
        factor = dict(shape.rope_scaling)["factor"]
        return modeling.DeepseekV2YarnRotaryEmbedding(shape.rotary_dim, positions, shape.rope_theta, factor, **scaling)


class Positions(nn.Layer):  # type: ignore[misc]
    """PaddleNLP's table of rotary positions in the form of its other families, [1, S, 1, D]; `flat`: of its DeepSeek,
    [S, D]."""

    def __init__(self, table: Any, flat: bool):
        super().__init__()
        self._table, self._flat = table, flat

    def forward(self, x: Any, seq_len: int) -> Any:
        parts = self._table(x, seq_len=seq_len)
        return tuple(each.reshape([-1, each.shape[-1]] if self._flat else [1, -1, 1, each.shape[-1]]) for each in parts)


def _latent_norm(config: Any, size: int) -> Any:
    config = copy(config)
    config.hidden_size, config.rms_norm_eps = size, LATENT_EPSILON
    return LlamaRMSNorm(config)
