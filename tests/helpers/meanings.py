"""Meanings of configs here and in transformers, recorded for single fields.

    .venv/bin/python tests/helpers/meanings.py ORACLE       writes tests/fixtures/config_meanings.json

ORACLE is the Python of an environment with transformers (tests/fixtures/make_huggingface.py says of which).
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.model import FAMILIES, ModelShape, shape_from_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = FIXTURES / "config_meanings.json"
Config = dict[str, Any]
COMMON: Config = {
    "vocab_size": 131, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 64,
    "initializer_range": 0.01, "rms_norm_eps": 1e-4, "rope_theta": 5e4, "rope_scaling": None,
    "tie_word_embeddings": False, "attention_dropout": 0.125, "quantization_config": None, "torch_dtype": "bfloat16",
    "dtype": "bfloat16", "pretraining_tp": 1,
}  # fmt: skip
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOWS: Config = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
EXPERTS: Config = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02}
QWEN_EXPERTS: Config = {
    **EXPERTS, **WINDOWS, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
YARN: Config = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 0.5,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
LATENT: Config = {
    "num_key_value_heads": 32, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5, "rope_scaling": YARN,
}  # fmt: skip
FULL = ["full_attention"] * 2
OWN: dict[str, Config] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    "qwen2": {**WINDOWS, "layer_types": FULL},
    "qwen3": {**WINDOWS, "layer_types": FULL, "attention_bias": True},
    "ernie4_5": {"head_dim": 8, "use_bias": True, "attention_dropout": 0.0},
    "ernie4_5_moe": {
        **{"head_dim": 8, "use_bias": True, "attention_dropout": 0.0, "output_router_logits": False},
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
    },
    "qwen2_moe": {**QWEN_EXPERTS, "shared_expert_intermediate_size": 32, "qkv_bias": True, "layer_types": FULL},
    "qwen3_moe": {**QWEN_EXPERTS, "attention_bias": True},
    "glm4_moe": {
        **{
            name: value
            for name, value in LATENT.items()
            if "_rank" not in name and not name.endswith(("nope_head_dim", "v_head_dim", "rope_head_dim"))
        },
        "num_key_value_heads": 2,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
    **{
        name: {**LATENT, **own}
        for name, own in {
            "deepseek_v2": {"norm_topk_prob": False, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
            "deepseek_v3": {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        }.items()
    },
    "mixtral": {**EXPERTS, "num_local_experts": 4, "sliding_window": None, "router_jitter_noise": 0.0},
    "gemma3_text": {
        **{"sliding_window": 16, "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attention_bias": True, "query_pre_attn_scalar": 16, "layer_types": None},
    },
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 16, "attention_bias": True, "layer_types": None},
    "qwen3_next": {
        **{name: value for name, value in QWEN_EXPERTS.items() if name not in WINDOWS},
        **{"shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25, "attention_bias": True},
        **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 16, "layer_types": None},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3},
    },
}
WHOLE = {name: {"model_type": name, **COMMON, **own} for name, own in OWN.items()}  # a config with all its fields
SIZES = {  # refused where they are left out: a config without them is no model's
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "num_local_experts"),
    *("moe_num_experts", "moe_k", "moe_num_shared_experts"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group"),  # one group among several is refused
    *("norm_topk_prob", "first_k_dense_replace"),  # null is; and a model whose layers are all dense
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "partial_rotary_factor",  # null turns whole heads in transformers
}
# Null asks for nothing here, as PaddleNLP reads it, where transformers refuses it.
ALSO_NULL = {
    *("head_dim", "num_key_value_heads", "attention_dropout", "hidden_act", "qkv_bias"),
    *("hidden_activation", "query_pre_attn_scalar"),
    *("decoder_sparse_step", "router_jitter_noise", "use_sliding_window", "max_window_layers", "topk_group"),
}


def single_changes() -> dict[str, Config]:
    """Each family's whole config, and with each field removed, and null."""
    found = dict(WHOLE)
    for name, whole in WHOLE.items():
        for field in whole.keys() - {"model_type"}:
            found[f"{name} without {field}"] = {key: value for key, value in whole.items() if key != field}
            found[f"{name} with null {field}"] = whole | {field: None}
    return dict(sorted(found.items()))


def meaning(config: Config) -> dict[str, Any] | None:
    """As transformers_configs.py says it, of a config as it is read here; None: refused."""
    try:
        shape = shape_from_config(config, "")
    except UserError:
        return None
    return {
        "layers": shape.layers, "hidden_size": shape.hidden_size, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings, "tied_embeddings": shape.tied_embeddings,
        "rms_norm_eps": shape.rms_norm_eps, "initializer_range": shape.initializer_range,
        "attention_dropout": shape.attention_dropout,
        "frequencies": [float(f"{frequency:.5g}") for frequency in _frequencies(shape)], "activation": True,
        "attention": [-1 if kind.linear else kind.window for kind in map(shape.of, range(shape.layers))],
        "quantised": False, "parameters": shape.parameters, "experts_per_token": shape.experts_per_token,
        "norm_topk": shape.norm_topk, "groups": [shape.expert_groups, shape.groups_per_token],
        "scaling": shape.routed_scaling_factor, "router_aux_loss_coef": shape.router_aux_loss_coef,
    }  # fmt: skip


def _frequencies(shape: ModelShape) -> list[float]:
    """Frequencies of rotary positions, by the formula of Llama 3.1 or YaRN where they are scaled."""
    if shape.traits.untrained:  # plans do not depend on positions
        return []
    width = shape.rotary_dim
    found = [shape.rope_theta ** (-index / width) for index in range(0, width, 2)]
    if not shape.rope_scaling:
        return found
    values: dict[str, Any] = dict(shape.rope_scaling)
    if values["rope_type"] == "yarn":
        return list(_yarn(found, values, shape.rope_theta, width))
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]

    def scaled(frequency: float) -> float:
        waves = values["original_max_position_embeddings"] * frequency / (2 * math.pi)
        if waves > high or waves < low:
            return frequency if waves > high else frequency / factor
        smooth = (waves - low) / (high - low)
        return float((1 - smooth) * frequency / factor + smooth * frequency)

    return list(map(scaled, found))


def _yarn(frequencies: list[float], values: dict[str, Any], theta: float, width: int) -> Iterator[float]:
    """Waves that turn less than beta_slow times in the original length are slowed by the factor, those that turn more
    than beta_fast times are left; between them both are mixed."""

    def dimension(turns: float) -> float:
        length: float = values["original_max_position_embeddings"]
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(values["beta_fast"])), 0)
    high = min(math.ceil(dimension(values["beta_slow"])), width - 1)
    for place, frequency in enumerate(frequencies):
        slowed = min(max((place - low) / (high - low or 0.001), 0.0), 1.0)
        yield frequency * (1 - slowed) + frequency / values["factor"] * slowed


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two meanings are not the same: numbers to 4 digits, which the frequencies' float32 has."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, list):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other or (isinstance(one, float) and math.isclose(one, other, rel_tol=1e-4))

    return {key: (ours[key], theirs[key]) for key in ours if not same(ours[key], theirs[key])}


def _beside(stated: dict[str, Any], name: str) -> Any:
    """A meaning; of a changed config only its differences from the whole one's."""
    whole = stated[name.partition(" ")[0]]
    if name in WHOLE or stated[name] is None:
        return stated[name]
    return {key: value for key, value in stated[name].items() if value != whole[key]}


def recorded() -> dict[str, dict[str, Any] | None]:
    """Meanings of `single_changes` in transformers, by name; None: it refuses the config."""
    content = json.loads(RECORDED.read_text())
    return {
        name: stated if stated is None or name in WHOLE else content[name.partition(" ")[0]] | stated
        for name, stated in content.items()
    }


def by_transformers(oracle: str, configs: list[Config]) -> list[dict[str, Any] | None]:
    """Meanings of configs in transformers."""
    words = [oracle, "-W", "ignore", str(FIXTURES / "transformers_configs.py")]
    answer = subprocess.run(words, input=json.dumps(configs), capture_output=True, text=True, check=True)
    found: list[dict[str, Any] | None] = json.loads(answer.stdout)
    return found


THETAS = (1e4, 5e5, 1e6, 10000, None)
ROPES: tuple[Any, ...] = (
    None,
    {},
    LLAMA3,
    *({"rope_type": kind} for kind in ("default", "linear", "dynamic", "yarn")),
    {"type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)
VALUES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 32, None), "num_key_value_heads": (1, 8, 32, None),
    "hidden_act": ("silu", "swish", "relu", "gelu", "gelu_pytorch_tanh"), "tie_word_embeddings": (True, False),
    "rms_norm_eps": (1e-5, 1e-6), "initializer_range": (0.02, 0.006), "max_position_embeddings": (128, 4096),
    "attention_dropout": (0, 0.0, 0.25), "attention_bias": (True, False), "mlp_bias": (True, False),
    "qkv_bias": (True, False), "pretraining_tp": (1, 2), "alibi": (False, True), "partial_rotary_factor": (1.0, 0.5),
    "use_sliding_window": (True, False), "sliding_window": (None, 16, 4096), "max_window_layers": (0, 1, 2, 28),
    "layer_types": (
        *(FULL, ["sliding_attention"] * 2, [*FULL, "full_attention"], None, ["linear_attention", "full_attention"]),
        *(["full_attention", "sliding_attention"], ["linear_attention"] * 2),
    ),
    "sliding_window_pattern": (1, 2, 3), "full_attention_interval": (1, 2, 3), "linear_num_value_heads": (2, 3, 8),
    "mlp_layer_types": (["dense"] * 2, ["sparse"] * 2), "num_experts": (4, 8, 0), "num_local_experts": (4, 8),
    "num_experts_per_tok": (1, 4), "norm_topk_prob": (True, False), "n_group": (1, 2, 3, None), "topk_group": (1, 4),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "first_k_dense_replace": (0, 1, 2),
    "q_lora_rank": (None, 8), "rope_interleave": (True, False), "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], None), "shared_expert_intermediate_size": (16, 0), "moe_num_experts": (4, 8, [4, 4]),
    "moe_k": (1, 4), "moe_layer_start_index": (0, 1, 2), "moe_layer_end_index": (-1, 0, 1, 7),
    "moe_layer_interval": (1, 2, 3), "use_bias": (True, False), "output_router_logits": (True, False),
    "router_aux_loss_coef": (0.0, 0.001), "quantization_config": (None, {"quant_method": "fp8"}),
    "dtype": ("float32", "bfloat16"), "original_max_position_embeddings": (32, 16),
}  # fmt: skip


def random_config(random: Random) -> Config:
    """A family's config with a few fields removed, null, of another value, or in another place."""
    config = dict(WHOLE[random.choice(list(FAMILIES))])
    if random.random() < 0.5:  # as transformers 5 writes it
        rope = config.pop("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta")}
    for _ in range(random.randint(1, 4)):
        kind = random.random()
        field = random.choice(sorted(config.keys() - {"model_type"}))
        if kind < 0.25:
            del config[field]
        elif kind < 0.35:
            config[field] = None
        elif kind < 0.65:
            field = random.choice(list(VALUES))
            config[field] = random.choice(VALUES[field])
        else:
            place = random.choice(["rope_theta", "rope_scaling", "rope_parameters"])
            rope = random.choice(ROPES)
            theta = {} if rope is None or random.random() < 0.3 else {"rope_theta": random.choice(THETAS)}
            config[place] = random.choice(THETAS) if place == "rope_theta" else rope and {**rope, **theta}
    return config


if __name__ == "__main__":
    changes = single_changes()
    stated = dict(zip(changes, by_transformers(sys.argv[1], list(changes.values())), strict=True))
    lines = [f"{json.dumps(name)}: {json.dumps(_beside(stated, name))}" for name in stated]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
