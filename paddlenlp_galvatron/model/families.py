"""Families of decoder-only transformers and their differences, from families.json."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from .attention import Latents

LEAST_SUM = 1e-12  # least sum of a token's scores, as ERNIE's moe_norm_min
# Whether a layer has local attention, by its number and the value of a field of config.json.
RULES: dict[str, Callable[[int, int], bool]] = {
    "all": lambda *_: True,
    "even": lambda layer, _: layer % 2 == 0,
    "even_below": lambda layer, end: layer < end and layer % 2 == 0,
    "from": lambda layer, first: layer >= first,
    "but_last_of_period": lambda layer, period: (layer + 1) % period > 0,
}


@dataclass(frozen=True)
class Mixture:
    """Experts in place of a layer's MLP: a family's names for them, and the defaults of its configs."""

    inside: str = "mlp"  # the module of a layer that holds them
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of gate, up and down
    size: str = "moe_intermediate_size"  # field of config.json: columns of an expert
    counts: tuple[str, ...] = ("num_experts", "num_local_experts")  # the same: experts of a layer, transformers' names
    chosen: tuple[str, ...] = ("num_experts_per_tok",)  # the same: experts of a token
    normed: bool | None = None  # whether the scores of a token's experts sum to 1; None: norm_topk_prob says
    shared: str = ""  # the name of the shared expert, which processes all tokens
    shared_count: str = ""  # field of config.json: width in experts; "": it has a gate and its own width
    steps: bool = False  # decoder_sparse_step and mlp_only_layers make layers dense
    interval: bool = False  # ERNIE's moe_layer_start_index, moe_layer_end_index, moe_layer_interval
    grouped: bool = False  # DeepSeek's: experts are chosen within groups, first_k_dense_replace makes layers dense
    sigmoid: bool = False  # scores are sigmoids
    bias: str = ""  # name of each expert's bias, which only affects the choice
    router: str = "gate"
    biased: bool = False  # router and experts have biases
    methods: tuple[str, ...] = ("greedy",)  # ways to choose experts, by topk_method; the last one within groups

    @property
    def gated(self) -> bool:
        """Whether a gate weights the shared expert."""
        return not self.shared_count


@dataclass(frozen=True)
class Local:
    """Layers with attention to a window, or with linear attention, in place of attention to all tokens."""

    rule: str  # one of RULES
    field: str = ""  # field of config.json
    kind: str = "sliding_attention"  # name in layer_types
    listed: bool = True  # layer_types of config.json overrides the rule
    switch: str = ""  # field of config.json that enables local attention

    def at(self, layer: int, value: int) -> bool:
        """Whether a layer is local, by its number and the value of `field`."""
        return RULES[self.rule](layer, value)


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models: a value of `model_type` in config.json."""

    name: str
    title: str  # as the classes of transformers are called: Llama of LlamaForCausalLM
    prefix: str  # first word of its weights' names in PaddleNLP, and in checkpoints
    about: str  # its models, and their differences from PaddleNLP's of the prefix
    # Values in transformers of fields that config.json leaves out, if they are not the USUAL ones (fields.py).
    defaults: Mapping[str, float]
    qkv_bias: bool = False  # q, k and v always have biases
    rotary_share: float = 1.0  # share of a head that rotary positions rotate: partial_rotary_factor
    qk_norm: bool = False  # each head of q and k goes through a norm, whose scales all heads share
    # Fields of ModelShape, and the fields of config.json that turn them on.
    switches: Mapping[str, str] = field(default_factory=dict)
    # Ways to scale rotary positions: rope_type -> the numbers that it needs.
    rope_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixture: Mixture | None = None  # layers have experts
    latent: bool = False  # attention has latents
    dropout: bool = True  # attention_dropout is its own
    # Fields of config.json for which null means off; of head_dim, hidden_size over heads in place of its default.
    null_off: tuple[str, ...] = ()
    biased_head: bool = False  # the LM head has a bias where the MLP has
    local: Local | None = None  # some layers attend to less than all tokens
    sinks: bool = False  # each head's softmax has one more, learned score
    gated: bool = False  # q's projection also gives a gate of each head for attention's output
    # More than two: norms also after attention and MLP.
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    untrained: str = ""  # features that training lacks; "": none
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
    # A small model for checks: attention heads per kv head, and further fields of the shape.
    heads_per_kv_head: int = 1
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The name without a version: qwen of qwen2."""
        return self.name.partition("_")[0].rstrip("0123456789")


_TYPES: dict[str, Callable[..., Any]] = {"mixture": Mixture, "local": Local, "latents": Latents}


def _typed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of families.json with its lists as tuples, and the parts of a family as their types."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in pairs}
    return {name: _TYPES[name](**value) if name in _TYPES else value for name, value in values.items()}


_ROWS = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"), object_pairs_hook=_typed)
FAMILIES = {row["name"]: Family(**row) for row in _ROWS}  # keyed by `model_type` of config.json
TRAINED = {name: family for name, family in FAMILIES.items() if not family.untrained}


def family_of(name: str) -> Family:
    """The family of a model. Raises UserError for an unknown one."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
