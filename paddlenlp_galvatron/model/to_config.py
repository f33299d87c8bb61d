"""The fields of `config.json` that make a model's shape."""

from dataclasses import asdict
from typing import Any

from .families import Local, Mixture
from .shape import ModelShape
from .unsupported import MTP_COUNTS

FULL = "full_attention"  # a value of layer_types
COEFFICIENT = "router_aux_loss_coef"


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that make this shape."""
    latents = shape.latents
    return {
        "model_type": shape.family,
        "num_hidden_layers": shape.main_layers,
        **({MTP_COUNTS[0]: shape.mtp_layers} if shape.mtp_layers else {}),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        **(asdict(latents) | {"q_lora_rank": latents.q_lora_rank or None} if latents else {"head_dim": shape.head_dim}),
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tied_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        **({"partial_rotary_factor": shape.traits.rotary_share} if shape.traits.rotary_share != 1 else {}),
        **({"rope_scaling": dict(shape.rope_scaling)} if shape.rope_scaling else {}),
        "initializer_range": shape.initializer_range,
        "attention_dropout": shape.attention_dropout,
        **{
            field: on
            for name, field in shape.traits.switches.items()
            if (on := getattr(shape, name)) or shape.traits.defaults.get(field)
        },
        **_of_local_layers(shape, shape.traits.local),
        **_of_experts(shape),
    }


def _of_experts(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that describe a shape's experts."""
    mixture, coefficient = shape.traits.mixture, shape.router_aux_loss_coef
    if not shape.experts or mixture is None:
        return {}
    return {
        mixture.counts[0]: shape.experts,
        mixture.chosen[0]: shape.experts_per_token,
        mixture.size: shape.expert_size,
        **({"norm_topk_prob": shape.norm_topk} if mixture.normed is None else {}),
        **(_of_groups(shape, mixture) if mixture.grouped else {}),
        **({"shared_expert_intermediate_size": shape.shared_size} if mixture.shared and mixture.gated else {}),
        **({mixture.shared_count: shape.shared_size // max(shape.expert_size, 1)} if mixture.shared_count else {}),
        **(_of_intervals(shape) if mixture.interval else {}),
        **({COEFFICIENT: coefficient, "output_router_logits": True} if coefficient and not mixture.interval else {}),
        **({"mlp_only_layers": list(shape.dense_layers)} if mixture.steps and shape.dense_layers else {}),
    }


def _of_intervals(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that say which layers have experts, in ERNIE."""
    sparse = [index for index in range(shape.layers) if index not in shape.dense_layers]
    step = sparse[1] - sparse[0] if sparse[1:] else 1
    return {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1], "moe_layer_interval": step}


def _of_groups(shape: ModelShape, mixture: Mixture) -> dict[str, Any]:
    """The fields of config.json that describe DeepSeek's routing."""
    return {
        "first_k_dense_replace": len(shape.dense_layers),
        "topk_method": mixture.methods[-1] if shape.expert_groups > 1 or mixture.sigmoid else mixture.methods[0],
        "scoring_func": "sigmoid" if mixture.sigmoid else "softmax",
        "n_group": shape.expert_groups,
        "topk_group": shape.groups_per_token,
        "routed_scaling_factor": shape.routed_scaling_factor,
    }


def _of_local_layers(shape: ModelShape, local: Local | None) -> dict[str, Any]:
    """The fields of config.json that say which layers attend to all tokens, and how the others attend."""
    if not local:
        return {}
    alternates = bool(shape.window or shape.linear)
    sizes = {f"linear_{name}": size for name, size in asdict(shape.linear).items()} if shape.linear else {}
    windows = {"sliding_window": shape.window, **({local.switch: True} if local.switch else {})} if shape.window else {}
    layers = range(shape.main_layers)
    local_layers = [alternates and layer not in shape.full_layers for layer in layers]
    for number in (shape.traits.defaults.get(local.field, 0), *layers[1:], shape.main_layers) if alternates else ():
        if local_layers == [local.at(layer, int(number)) for layer in layers]:
            return sizes | windows | ({local.field: number} if local.field else {})
    if not local.listed or (local.switch and not alternates):
        return {}
    return sizes | windows | {"layer_types": [local.kind if is_local else FULL for is_local in local_layers]}
