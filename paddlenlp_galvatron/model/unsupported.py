"""Fields of config.json that ask for features that our layers lack: one list for all commands."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any

from ..base.errors import UserError
from .families import LEAST_SUM, Family
from .fields import as_json

OFF, ONE, NONE = (0,), (1,), (None,)  # 0 is equal to 0.0 and false, 1 to 1.0 and true
# Values that turn a feature off, and the fields (*: any letters). Null turns all of them off.
PLAIN: tuple[tuple[tuple[object, ...], str], ...] = (
    (("silu", "swish"), "*hidden_act hidden_activation activation_function"),
    (("rmsnorm", "rms_norm", "RMSNorm"), "norm_type layernorm_type layer_norm_type normalization"),
    (OFF, "*dropout* *pdrop* *drop_path* *jitter* *z_loss* *softcap*"),
    # Positions
    (OFF, "*alibi* use_long_sequence_strategies no_rope use_*ntk use_logn_attn use_mrope rope_interleave*"),
    (ONE, "use_rope use_rotary_embedding* rope_ratio rope_scaling_factor"),
    (ONE, "rotary_pct rotary_percent* rope_pct rope_percent* rope_fraction"),
    (("default",), "rope_type"),
    (("rope", "rotary"), "position_embedding_type"),
    (NONE, "rope_scaling_type mrope_section rope_base rotary_base rotary_emb_base rope_freq_base rope_local_base_freq"),
    # Attention
    (NONE, "attention_multiplier query_pre_attn_scalar clip_qkv attention_chunk_size sliding_window_pattern"),
    (NONE, "no_rope_layers no_rope_layer_interval"),
    (OFF, "attn_output_gate attn_temperature_tuning num_kv_shared_layers"),
    (OFF, "use_bidirectional_attention add_cross_attention"),
    (ONE, "is_causal"),
    # Layers, additions to them, and their scales
    (({}, []), "per_layer_config pruned_heads"),
    (ONE, "pretraining_tp scale_emb logit_scale logits_scale logit_scaling logits_scaling *_multiplier *_multipliers"),
    (NONE, "scale_depth layers_block_type expert_layer_* attn_layer_* vision_config"),
    (OFF, "use_parallel_residual parallel_attn zero_centered_gamma scale_embedding* normalize_embedding*"),
    (OFF, "is_encoder_decoder tie_encoder_decoder num_nextn_predict_layers mtp_num_layers num_mtp_layers"),
    # Experts
    (ONE, "moe_layer_freq"),
)
# Fields that match the list but are supported, belong to classifiers, or choose a kernel.
FREE = "classifier_dropout summary_* use_fused_*"
# Fields that no layer depends on, or that are judged by their values alone.
IDLE = "architectures auto_map text_config model_type *token* *dtype use_cache *_version _* *_window* mlp_only* *_step"
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")  # two names of one number, of layers for MTP
EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts num_shared_experts"
ALGORITHMS = ("weight_quantize_algo", "quant_type", "quant_method")  # fields of PaddleNLP's configs; all null: none


def require_supported(config: dict[str, Any], family: Family, layers: int, source: str) -> None:
    """Raises UserError for fields that ask for features that our layers of the family lack."""
    if faults := list(faults_of(config, family, layers).values()):
        raise UserError(f"{source}: {fault}" for fault in faults[:2])


def faults_of(config: dict[str, Any], family: Family, layers: int) -> dict[str, str]:
    """The fault of each field that asks for a feature that our layers of the family lack."""
    plain = [(_any_of(names), values) for values, names in (*_plain_of(family, layers), *PLAIN)]
    faults = {field: fault for field, value in config.items() if (fault := _fault(field, value, family, plain))}
    if not family.local and config.get("sliding_window") is not None:
        faults["sliding_window"] = "sliding_window asks for attention to a window; give a model with full attention"
    return faults


def _fault(
    field: str, value: Any, family: Family, plain: Sequence[tuple[re.Pattern[str], tuple[object, ...]]]
) -> str | None:
    """The fault of a field, if any. `plain`: patterns of names, and their values that change nothing."""
    free = field in (*family.switches.values(), *family.unplanned) or (field == "attention_dropout" and family.dropout)
    if value is None or free or _any_of(FREE).match(field):
        return None
    if "quant" in field or field == "compression_config":
        plainly = isinstance(value, dict) and all(value.get(name, 0) is None for name in ALGORITHMS)
        if value is False or plainly or (isinstance(value, dict) and value.get("quant_method") in family.dequantised):
            return None
        return f"{field}: the weights are quantised; take the model that they were made from"
    values = next((values for names, values in plain if names.match(field)), (value,))
    wanted = bool(values[0]) if isinstance(value, bool) and values in (OFF, ONE) else values[0]
    return None if value in values else f"{field} is {as_json(value)}; {as_json(wanted)} alone is supported"


def has_meaning(field: str, family: Family) -> bool:
    """Whether a field that is not read for the family may change the computation of its layers."""
    names = FREE, IDLE, *(names for _, names in (*PLAIN, *_plain_of(family, 0)))
    return not _any_of(" ".join(names)).match(field)


@lru_cache
def _any_of(names: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names.split())))


def _plain_of(family: Family, layers: int) -> Iterator[tuple[tuple[object, ...], str]]:
    """Values of fields that match the family's layers anyway."""
    mixture = family.mixture
    yield (family.rotary_share,), "partial_rotary_factor"
    yield (family.qkv_bias,), "*qkv_bias"
    yield OFF, "*_bias bias use_bias add_bias_linear"
    yield (family.qk_norm,), "*qk_norm *qk_layernorm"
    if not family.local or not family.local.listed:
        yield (["full_attention"] * layers,), "layer_types"
    if family.activation:
        yield (family.activation,), "hidden_activation"
    yield (["sparse" if mixture else "dense"] * layers,), "mlp_layer_types"
    counts = (*mixture.counts, mixture.shared_count) if mixture else ()
    yield OFF, " ".join(name for name in EXPERTS.split() if name not in counts)
    if not mixture or not mixture.steps:
        yield ONE, "decoder_sparse_step"
        yield ([],), "mlp_only_layers"
    if not mixture or not mixture.interval:
        yield NONE, "moe_layer_start_index moe_layer_end_index"
    else:
        yield OFF, "output_router_logits"  # transformers balances choices without the bias
        yield (LEAST_SUM,), "moe_norm_min"
    if not mixture or not mixture.shared or not mixture.gated:
        yield OFF, "shared_expert_intermediate_size"
    if mixture and mixture.normed is not None:
        yield ONE if mixture.normed else OFF, "norm_topk_prob"
    if not family.latent:
        yield NONE, "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
    if not mixture or not mixture.grouped:
        yield ONE, "routed_scaling_factor"
        yield OFF, "first_k_dense_replace"
        yield (1, 0), "n_group topk_group"
        yield ("greedy",), "topk_method"
    else:
        yield (True,), "rope_interleave"
    if mixture and mixture.bias:
        yield (1, 0), " ".join(MTP_COUNTS)
    yield ("sigmoid" if mixture and mixture.sigmoid else "softmax",), "scoring_func"
