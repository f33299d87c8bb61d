"""Code shared by the families: PaddleNLP names the parts of their decoder layers equally."""

from collections.abc import Callable
from functools import reduce
from typing import Any

from paddle import nn
from paddlenlp.transformers.llama import fusion_ops

from ...model import ModelShape, config_of
from ...model.unsupported import MTP_COUNTS
from ..kernels import PLAIN, Kernels, rms_norm


def _rms_norm(x: Any, weight: Any, epsilon: float, use_fast_ln: bool = False) -> Any:
    return rms_norm(x, weight, epsilon)


# PaddleNLP's norms look for a package that users compile; Paddle includes the same kernel.
fusion_ops.rms_norm_fused = _rms_norm


class Adapter:
    """Runs a family whose decoder layer has Llama's parts by PaddleNLP. Sub-classes name PaddleNLP's classes."""

    config_class: type[Any]
    layer_class: Callable[..., Any]
    norm_class: type[Any]
    model_class: type[Any]
    rotary_class: type[Any]

    def config(self, shape: ModelShape, seq_length: int, kernels: Kernels = PLAIN) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""
        fields = {name: value for name, value in config_of(shape).items() if name not in ("model_type", *MTP_COUNTS)}
        return self.config_class(
            **fields,
            seq_length=seq_length,
            use_cache=False,
            use_flash_attention=kernels.flash_attention,
            use_fused_rope=kernels.fused_rope,
            use_fused_rms_norm=kernels.fused_rms_norm,
            use_fast_layer_norm=False,  # Llama's norm reads it
        )

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        """One decoder layer of PaddleNLP's, with the weights of `shape.block`."""
        layer = self.layer_class(config)
        self._fit(layer, shape, config)
        return layer

    def final_norm(self, config: Any) -> Any:
        """The norm before the LM head."""
        return self.norm_class(config)

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        """PaddleNLP's causal language model: the reference of the parity check."""
        model = self.model_class(config)
        for _ in range(shape.mtp_layers):  # the caller replaces their forward
            getattr(model, shape.traits.prefix).layers.append(self.layer_class(config))
        for index, layer in enumerate(getattr(model, shape.traits.prefix).layers):
            self._fit(layer, shape.of(index), config)
        return model

    def _fit(self, layer: Any, shape: ModelShape, config: Any) -> None:
        """Give a layer the projections and rotary positions of the shape where PaddleNLP's differ."""
        if shape.mtp_layers:
            layer.shared_head = nn.Layer()
            layer.enorm, layer.hnorm, layer.shared_head.norm = (self.final_norm(config) for _ in range(3))
            layer.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias_attr=False)
        wanted = {weight.name: weight.shape for weight in shape.block.weights}
        for name in [weight.name for weight in shape.block.weights if weight.linear]:
            path = name.removesuffix(".weight")
            *steps, attribute = path.split(".")
            owner = reduce(getattr, steps, layer)
            built, biased = getattr(owner, attribute), f"{path}.bias" in wanted
            if tuple(built.weight.shape) != wanted[name] or biased != (built.bias is not None):
                setattr(owner, attribute, nn.Linear(*wanted[name], bias_attr=None if biased else False))
        attention = layer.self_attn
        attention.head_dim = shape.head_dim
        # For samples of this length: a table of all of Llama 3.1's positions takes 128 MiB in each layer.
        attention.rotary_emb = self._rotary(shape, config.seq_length)

    def _rotary(self, shape: ModelShape, positions: int) -> Any:
        return self.rotary_class(shape.head_dim, positions, shape.rope_theta)
