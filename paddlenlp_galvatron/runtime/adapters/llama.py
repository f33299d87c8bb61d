"""Llama, and ERNIE-4.5 without its experts, by PaddleNLP's layers of Llama."""

from functools import partial
from typing import Any

from paddlenlp.transformers.llama import modeling
from paddlenlp.transformers.llama.configuration import LlamaConfig

from ...model import ModelShape
from .decoder import Adapter


class Llama(Adapter):
    config_class = LlamaConfig
    layer_class = modeling.LlamaDecoderLayer
    norm_class = modeling.LlamaRMSNorm
    model_class = modeling.LlamaForCausalLM
    rotary_class = modeling.LlamaRotaryEmbedding

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        if not shape.rope_scaling:
            return super()._rotary(shape, positions)
        scaling = {name: value for name, value in shape.rope_scaling if name != "rope_type"}
        return modeling.Llama3RotaryEmbedding(shape.head_dim, positions, shape.rope_theta, **scaling)


class Ernie(Llama):
    """Here rotary positions rotate neighbouring elements of a head, in Llama elements half a head apart. Both give the
    same attention scores once the elements of each head of q and k are sorted in one way."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        model = super().whole_model(shape, config)
        for weight in shape.head.weights[2:]:
            bias = model.lm_head.bias = model.create_parameter(list(weight.shape), is_bias=True)
            model.lm_head.register_forward_post_hook(lambda _layer, _inputs, logits, bias=bias: logits + bias)
        return model

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        super()._fit(layer, shape, config)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_post_hook(partial(_by_halves, shape.head_dim))


def _by_halves(width: int, _layer: Any, _inputs: Any, heads: Any) -> Any:
    """Sort each head: first elements of all pairs, then second elements; [..., N * D] for any number of heads N."""
    return heads.reshape([*heads.shape[:-1], -1, width // 2, 2]).swapaxes(-1, -2).reshape(heads.shape)
