"""Families of decoder-only transformers: their differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from .latents import Latents

DEFAULTS: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))
LEAST_SUM = 1e-12  # of the softmax scores of a token's experts, as ERNIE's moe_norm_min has it


_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Mixture:
    """Experts in place of a layer's MLP: a family's names for them, and the defaults of its configs."""

    inside: str = "mlp"  # the part of a layer that has them
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of gate, up and down
    size: str = "moe_intermediate_size"  # field of config.json: columns of an expert
    counts: tuple[str, ...] = ("num_experts", "num_local_experts")  # the same: experts of a layer, transformers' names
    chosen: tuple[str, ...] = ("num_experts_per_tok",)  # the same: experts of a token
    normed: bool | None = None  # whether the scores of a token's experts sum to 1; None: norm_topk_prob says
    shared: str = ""  # the name of one more expert, which has all tokens
    shared_count: str = ""  # field of config.json: how many experts it is as wide as; "": it has a gate and its width
    steps: bool = False  # decoder_sparse_step and mlp_only_layers make layers dense
    interval: bool = False  # ERNIE's moe_layer_start_index, moe_layer_end_index, moe_layer_interval
    grouped: bool = False  # DeepSeek's: experts are chosen within groups, first_k_dense_replace makes layers dense
    sigmoid: bool = False  # scores are sigmoids
    bias: str = ""  # name of a bias of each expert that counts in the choice alone
    router: str = "gate"
    biased: bool = False  # router and experts have biases
    methods: tuple[str, ...] = ("greedy",)  # ways to choose experts, by topk_method; the last one within groups

    @property
    def gated(self) -> bool:
        """Whether the shared expert counts as far as its gate says."""
        return not self.shared_count


@dataclass(frozen=True)
class Local:
    """Layers with attention to a window, or with linear attention, in place of attention to all tokens."""

    at: Callable[[int, int], bool]  # whether a layer is one, by its number and the value of `field`
    field: str = ""  # field of config.json
    kind: str = "sliding_attention"  # name in layer_types
    listed: bool = True  # layer_types, where config.json has it, counts in place of `at`
    switch: str = ""  # field of config.json without which no layer is one


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models: a value of `model_type` in config.json."""

    name: str
    title: str  # as the classes of transformers are called: Llama of LlamaForCausalLM
    prefix: str  # first word of its weights' names in PaddleNLP, and in checkpoints
    qkv_bias: bool = False  # q, k and v always have biases
    rotary_share: float = 1.0  # of a head's numbers that rotary positions turn: partial_rotary_factor
    qk_norm: bool = False  # each head of q and k goes through a norm, whose scales all heads share
    # Fields of config.json that may be true, and the fields of ModelShape that they turn on.
    switches: Mapping[str, str] = field(default_factory=dict)
    # Ways to scale rotary positions: rope_type -> the numbers that it needs.
    rope_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixture: Mixture | None = None  # layers have experts
    latent: bool = False  # attention has latents
    dropout: bool = True  # attention_dropout is its own
    null_head_dim: bool = False  # a head_dim of null means hidden_size over heads, though it has a default
    local: Local | None = None  # some layers attend to less than all tokens
    sinks: bool = False  # each head's softmax has one more, learned score
    gated: bool = False  # attention's output is multiplied by a gate of each head, which q's projection gives
    norms: tuple[str, ...] = _NORMS  # more than two: behind attention and MLP, too
    untrained: str = ""  # the parts that training lacks for it; "": none
    activation: str = ""  # hidden_activation, where it is not SiLU
    # Fields of config.json that plans do not depend on, and methods of quantised files that are trained in 16 bits.
    unplanned: tuple[str, ...] = ()
    dequantised: tuple[str, ...] = ()
    # Capabilities of stock PaddleNLP's model: shared kv heads under tensor parallelism, Ulysses, recompute of some
    # layers of a pipeline.
    stock: bool = True
    stock_shares_kv_heads: bool = False
    stock_ulysses: bool = False
    stock_recomputes_some: bool = False
    # A small model of it, as checks make: attention heads for each kv head, and further fields of the shape.
    heads_per_kv_head: int = 1
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> Mapping[str, float]:
        """Values in transformers of fields that config.json leaves out, if they are not the USUAL ones (fields.py)."""
        return DEFAULTS[self.name]

    @property
    def line(self) -> str:
        """The name without a version: qwen of qwen2."""
        return self.name.partition("_")[0].rstrip("0123456789")


# DeepSeek's positions: each wave is slowed by up to the factor, and attention's scores are scaled (YaRN,
# arXiv:2309.00071).
YARN = {"yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
_DEEPSEEK: dict[str, Any] = {
    "counts": ("n_routed_experts", "num_experts"),
    "shared": "shared_experts",
    "shared_count": "n_shared_experts",
    "grouped": True,
}
_BY_SIGMOID = {"sigmoid": True, "bias": "gate.e_score_correction_bias", "methods": ("noaux_tc",)}
_SIGMOIDS = _DEEPSEEK | _BY_SIGMOID | {"counts": ("n_routed_experts", "num_local_experts")}
# Qwen's windows: in the dense families of the layers from one on.
_WINDOWS = Local(lambda layer, first: layer >= first, "max_window_layers", switch="use_sliding_window")
_ROUTED: dict[str, Any] = {"expert_groups": 2, "groups_per_token": 1, "routed_scaling_factor": 2.5}
_EXAMPLE = _ROUTED | {"latents": Latents(16, 20, 16, 8, 12)}

_ALL = (
    # Llama 1, 2 and 3.
    Family(
        "llama",
        "Llama",
        "llama",
        switches={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        # Llama 3.1 to 3.3: long waves are slowed by the factor, short ones are left, those between are mixed.
        rope_types={"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")},
        stock_shares_kv_heads=True,
        stock_ulysses=True,
        stock_recomputes_some=True,
    ),
    # Qwen2 and Qwen2.5.
    Family(
        "qwen2",
        "Qwen2",
        "qwen2",
        qkv_bias=True,
        local=_WINDOWS,
        heads_per_kv_head=2,
    ),
    # Qwen3, the dense ones: heads of a size of their own, and a norm on each head of q and k.
    Family(
        "qwen3",
        "Qwen3",
        "qwen2",  # PaddleNLP 3.0.0b4 has no Qwen3: its Qwen2 is one with those norms
        qk_norm=True,
        switches={"attention_bias": "attention_bias"},
        local=_WINDOWS,
        stock=False,
        heads_per_kv_head=2,
        example={"own_head_dim": 16},
    ),
    # ERNIE-4.5, the dense ones.
    Family(
        "ernie4_5",
        "Ernie4_5",
        "llama",  # PaddleNLP 3.0.0b4 has none: its Llama is one with other rotary positions
        dropout=False,
        null_head_dim=True,
        stock=False,
        heads_per_kv_head=2,
        example={"own_head_dim": 16},
    ),
    # ERNIE-4.5 with experts.
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        "llama",  # ERNIE-4.5's name
        mixture=Mixture(
            counts=("moe_num_experts", "num_experts"),
            chosen=("moe_k", "num_experts_per_tok"),
            normed=True,
            shared="shared_experts",
            shared_count="moe_num_shared_experts",
            interval=True,
            bias="moe_statics.e_score_correction_bias",
        ),
        dropout=False,
        stock=False,
        heads_per_kv_head=2,
        example={"own_head_dim": 16},
    ),
    # Qwen1.5-MoE and Qwen2's models with experts, one of which has all tokens.
    Family(
        "qwen2_moe",
        "Qwen2Moe",
        "qwen2",
        qkv_bias=True,
        mixture=Mixture(counts=("num_experts",), shared="shared_expert", steps=True),
        local=replace(_WINDOWS, at=lambda layer, end: layer < end and layer % 2 == 0),
        stock=False,  # PaddleNLP 3.0.0b4's own fails on Paddle 3.3.1
        heads_per_kv_head=2,
    ),
    # Qwen3's models with experts.
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        "qwen2",  # as Qwen3: PaddleNLP's Qwen2 with norms of q and k
        qk_norm=True,
        switches={"attention_bias": "attention_bias"},
        mixture=Mixture(steps=True),
        local=Local(lambda *_: True, listed=False, switch="use_sliding_window"),
        stock=False,
        heads_per_kv_head=2,
        example={"own_head_dim": 16},
    ),
    # Mixtral.
    Family(
        "mixtral",
        "Mixtral",
        "llama",  # its layers are Llama's but for the experts
        mixture=Mixture(
            "block_sparse_moe",
            ("w1", "w3", "w2"),
            "intermediate_size",
            ("num_local_experts", "num_experts"),
            normed=True,
        ),
        local=Local(lambda *_: True, listed=False),
        stock=False,  # PaddleNLP 3.0.0b4's own fails on Paddle 3.3.1
        heads_per_kv_head=2,
    ),
    # GLM-4.5 and GLM-4.5-Air.
    Family(
        "glm4_moe",
        "Glm4Moe",
        "qwen2",  # PaddleNLP has no GLM-4.5: its Qwen2 is one but for rotary positions, norms of q and k, and experts
        rotary_share=0.5,
        switches={"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
        mixture=Mixture(**_SIGMOIDS),
        stock=False,
        heads_per_kv_head=2,
        example=_ROUTED | {"own_head_dim": 16, "qkv_bias": True, "qk_norm": True, "norm_topk": True},
    ),
    # DeepSeek-V2 and V2-Lite.
    Family(
        "deepseek_v2",
        "DeepseekV2",
        "deepseek_v2",
        rope_types=YARN,
        mixture=Mixture(**_DEEPSEEK, normed=False, methods=("greedy", "group_limited_greedy")),
        stock=False,
        latent=True,
        example=_EXAMPLE,
    ),
    # DeepSeek-V3, R1 and Moonlight.
    Family(
        "deepseek_v3",
        "DeepseekV3",
        "deepseek_v2",  # PaddleNLP's own is that of V2
        rope_types=YARN,
        mixture=Mixture(**_SIGMOIDS),
        stock=False,
        latent=True,
        example=_EXAMPLE | {"norm_topk": True},
    ),
    # Gemma 3 without its vision.
    Family(
        "gemma3_text",
        "Gemma3",
        "llama",
        qk_norm=True,
        switches={"attention_bias": "attention_bias"},
        rope_types={"linear": ("factor",)},
        local=Local(lambda layer, period: (layer + 1) % period > 0, "sliding_window_pattern"),
        norms=(*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        untrained="windows, norms behind attention and MLP, and GELU",
        activation="gelu_pytorch_tanh",
        unplanned=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    ),
    # gpt-oss.
    Family(
        "gpt_oss",
        "GptOss",
        "llama",
        switches={"attention_bias": "attention_bias"},
        rope_types={"yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")},
        mixture=Mixture(
            size="intermediate_size",
            counts=("num_local_experts", "num_experts"),
            normed=True,
            router="router",
            biased=True,
        ),
        local=Local(lambda layer, _: layer % 2 == 0),
        sinks=True,
        null_head_dim=True,
        untrained="windows, attention sinks, and biases of experts",
        dequantised=("mxfp4",),
    ),
    # Qwen3-Next.
    Family(
        "qwen3_next",
        "Qwen3Next",
        "qwen2",
        rotary_share=0.25,
        qk_norm=True,
        switches={"attention_bias": "attention_bias"},
        mixture=Mixture(counts=("num_experts",), shared="shared_expert", steps=True),
        local=Local(lambda layer, period: (layer + 1) % period > 0, "full_attention_interval", "linear_attention"),
        gated=True,
        untrained="linear attention, and the gate of attention's output",
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}  # keyed by `model_type` of config.json
TRAINED = {name: family for name, family in FAMILIES.items() if not family.untrained}


def family_of(name: str) -> Family:
    """The family of a model. Raises UserError for an unknown one."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
