"""What Llama and Qwen2 share: PaddleNLP names their parts alike."""

from __future__ import annotations

from typing import Any

from ..plan import ModelShape


class DecoderFamily:
    """Adapter of a family whose decoder layer has Llama's parts. Sub-classes name PaddleNLP's classes."""

    name: str
    prefix: str
    attention = "self_attn"
    attention_norm = "input_layernorm"
    attention_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_kv = ("self_attn.k_proj", "self_attn.v_proj")
    attention_row = "self_attn.o_proj"
    mlp_norm = "post_attention_layernorm"
    mlp_columns = ("mlp.gate_proj", "mlp.up_proj")
    mlp_row = "mlp.down_proj"

    config_class: type[Any]
    layer_class: type[Any]
    norm_class: type[Any]
    model_class: type[Any]

    def config(self, shape: ModelShape, seq_length: int, flash_attention: bool = False) -> Any:
        return self.config_class(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.max_position_embeddings,
            seq_length=seq_length,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=shape.tied_embeddings,
            initializer_range=shape.initializer_range,
            attention_dropout=shape.attention_dropout,
            use_cache=False,
            use_flash_attention=flash_attention,
        )

    def decoder_layer(self, config: Any) -> Any:
        return self.layer_class(config)

    def final_norm(self, config: Any) -> Any:
        return self.norm_class(config)

    def whole_model(self, config: Any) -> Any:
        return self.model_class(config)
