"""The model's shape, and the kinds of layers that a model of that shape is a sequence of."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ..base.errors import UserError
from .attention import DeltaNet, Latents, delta_attention, latent_attention, plain_attention
from .families import Family, family_of
from .fields import USUAL
from .layer import LayerKind
from .sublayers import embedding, lm_head, mlp, mtp, norms, routed_experts, router, shared_expert


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder-only transformer. Its layers are identical, or of several kinds: with experts, dense, and the
    last one for multi-token prediction (MTP).
    A model whose layer types differ in width or length of samples is a sequence of shapes, one a type, in the order of
    its layers; its embedding is the first one's, its LM head the last one's.
    """

    name: str
    family: str  # one of FAMILIES
    layers: int  # number of layers with MTP's
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = USUAL["initializer_range"]  # standard deviation of the weights at the start
    attention_dropout: float = 0.0  # plans do not depend on it
    seq_length: int | None = None  # sequence length of these layers; None: the run's
    own_head_dim: int | None = None  # unset: hidden_size / heads
    attention_bias: bool = False  # of q, k, v and output, in families that leave it open
    mlp_bias: bool = False
    qkv_bias: bool = False  # of q, k and v alone, in families that leave it open
    qk_norm: bool = False  # norms of the heads of q and k, in families that leave them open
    rope_scaling: tuple[tuple[str, int | float | str], ...] = ()  # config.json's entries; (): plain positions
    experts: int = 0  # experts of a layer, in place of its MLP; 0: a dense model
    experts_per_token: int = 0
    expert_size: int = 0  # columns of an expert; 0: the layer without experts, to measure only its router
    shared_size: int = 0  # columns of the expert that has all tokens; 0: none
    norm_topk: bool = False  # the scores of a token's experts are divided by their sum
    router_aux_loss_coef: float = 0.0  # coefficient of the balance loss; no effect on plans
    dense_layers: tuple[int, ...] = ()  # rising numbers of the layers that have an MLP in place of experts
    latents: Latents | None = None  # latent attention; None: plain attention
    expert_groups: int = 1  # a token's experts are chosen within the best `groups_per_token` of these groups
    groups_per_token: int = 1
    routed_scaling_factor: float = 1.0  # factor of the scores of a token's experts
    window: int = 0  # most tokens that attention sees, including the token itself; 0: all
    linear: DeltaNet | None = None  # linear attention's sizes
    full_layers: tuple[int, ...] = ()  # rising numbers of the layers with attention to all tokens in place of these
    mtp_layers: int = 0  # last layers that predict a further token: 0 or 1

    @property
    def pre_softmax(self) -> int:
        """1 if scores are computed over all experts before the choice: Megatron-LM's option of this name."""
        return int(self.experts > 0 and not self.norm_topk)

    @property
    def kinds(self) -> tuple[ModelShape, ...]:
        """A shape for each kind of layer, in order of first use: that of a model of its `layers` layers alone."""
        return _kinds(self)

    @property
    def kind_of_layers(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer's kind."""
        return _kind_of_layers(self)

    def of(self, index: int) -> ModelShape:
        """The kind of a layer, whose `block` and `routed` describe the layer."""
        return self.kinds[self.kind_of_layers[index]]

    def having(self, main_layers: int, mtp_layers: int) -> ModelShape:
        """The model with fewer of its layers, or more MoE layers, with or without MTP."""
        kinds = self.dense_layers, self.full_layers
        dense, full = (tuple(layer for layer in kind if layer < main_layers) for kind in kinds)
        layers = main_layers + mtp_layers
        return replace(self, layers=layers, mtp_layers=mtp_layers, dense_layers=dense, full_layers=full)

    @property
    def main_layers(self) -> int:
        """Layers without that of MTP: num_hidden_layers of config.json."""
        return self.layers - self.mtp_layers

    @property
    def most_mtp_layers(self) -> int:
        """Layers for MTP that this family can have here."""
        return int(bool(self.traits.mixture and self.traits.mixture.sigmoid))

    @property
    def layers_with_experts(self) -> int:
        return sum(kind.layers for kind in self.kinds if kind.experts)

    @property
    def head_dim(self) -> int:
        """Numbers of a head's q, and of its k."""
        if self.latents:
            return self.latents.head_dim
        return self.own_head_dim or self.hidden_size // self.heads

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head's q that rotary positions turn."""
        return self.latents.qk_rope_head_dim if self.latents else int(self.head_dim * self.traits.rotary_share)

    @property
    def normed_heads(self) -> bool:
        """Whether each head of q and k goes through a norm."""
        return self.qk_norm or self.traits.qk_norm

    @property
    def value_dim(self) -> int:
        """Numbers of a head's v; of linear attention, whose kind has the heads of keys, of all that share a key."""
        if self.linear:
            return self.linear.value_dim
        return self.latents.v_head_dim if self.latents else self.head_dim

    @property
    def q_width(self) -> int:
        """Numbers a token of q."""
        return self.heads * self.head_dim

    @property
    def k_width(self) -> int:
        """Numbers a token of k."""
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        """Numbers a token of v."""
        return self.kv_heads * self.value_dim

    @property
    def context_width(self) -> int:
        """Numbers a token of attention's output."""
        return self.heads * self.value_dim

    @property
    def k_product_width(self) -> int:
        """Numbers a token of the output of k's projection: of latents k without positions, and v."""
        return self.heads * self.latents.product_dim if self.latents else self.k_width

    def pairs(self, seq: float, causal: bool = True) -> float:
        """Mean number of tokens to which a token attends, at a sequence length. Kernels that are not `causal` compute
        all pairs and mask."""
        if self.linear:
            return 0.0
        seen = min(self.window or seq, seq)
        return seen - seen * seen / (2 * seq) if causal else seq

    def core_flops(self, seq: float, causal: bool = True) -> float:
        """Operations of forward a token in attention of a layer of this kind, besides products with weights."""
        return self.pairs(seq, causal) * self.block.pair_flops + sum(each.flops for each in self.block.sublayers)

    @property
    def attention(self) -> str:
        """The local attention of this kind of layer, in words; "": attention to all tokens."""
        return "linear attention" if self.linear else f"window {self.window:,}" if self.window else ""

    @property
    def lacking(self) -> str:
        """Features that PaddleNLP's layers lack to train it; "": none."""
        return self.traits.untrained or ("windows of attention" if self.window else "")

    def trained(self) -> ModelShape:
        """This shape. Raises UserError for a model that is planned only."""
        if self.lacking:
            raise UserError(
                f"model {self.name}: the layers that training builds on PaddleNLP lack {self.lacking}; it is planned "
                "only: galvatron fit, search, explain"
            )
        return self

    @property
    def traits(self) -> Family:
        """The traits of its family. Raises UserError for an unknown one."""
        return family_of(self.family)

    @property
    def embedding(self) -> LayerKind:
        return _embedding(self)

    @property
    def block(self) -> LayerKind:
        """A decoder layer without its routed experts."""
        return _block(self)

    @property
    def routed(self) -> LayerKind:
        """The routed experts of a decoder layer; a dense model has none."""
        return _routed(self)

    @property
    def layer(self) -> LayerKind:
        """A whole decoder layer."""
        return _layer(self)

    @property
    def mlp_size(self) -> int:
        """Columns of the MLP, or of the shared expert; 0: none."""
        return self.shared_size if self.experts else self.intermediate_size

    @property
    def head(self) -> LayerKind:
        """Last norm and LM head, whose table is the embedding's where the model ties the two."""
        return _head(self)

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer without its routed experts."""
        return self.block.parameters

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        twice = self.embedding.parameters if self.tied_embeddings else 0
        layers = sum(kind.layers * kind.layer.parameters for kind in self.kinds)
        return self.embedding.parameters + layers + self.head.parameters - twice

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all, without the experts that its router does not choose."""
        idle = self.experts - self.experts_per_token
        return self.parameters - self.layers_with_experts * self.routed.parameters * idle // max(self.experts, 1)

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the vocabulary tables when `tp` ranks split them: the next multiple of tp."""
        return self.embedding.weights[0].padded_length(tp)

    @property
    def fingerprint(self) -> str:
        """Short hash of all fields that planning depends on; independent of the name."""
        planned = asdict(self) | {"initializer_range": USUAL["initializer_range"]}  # no effect on plans
        stated = {key: value for key, value in planned.items() if key not in UNPLANNED}
        return _short_hash({key: value for key, value in stated.items() if not (key in YOUNG and value == YOUNG[key])})


CHOICE_BIAS = "e_score_correction_bias"  # each expert's bias, only for the choice; transformers' name
UNPLANNED = ("name", "attention_dropout", "router_aux_loss_coef")  # plans do not depend on these
ROUTING = ("expert_groups", "groups_per_token", "routed_scaling_factor")
EXPERTS = ("experts", "experts_per_token", "expert_size", "shared_size", "norm_topk", *ROUTING)
LOCAL = ("window", "linear")
SIZES = ("own_head_dim", "attention_bias", "mlp_bias", "qkv_bias", "qk_norm", "latents", *LOCAL, *EXPERTS)
# Fields added later: at these values a fingerprint is the same as before them.
YOUNG = {
    field.name: field.default
    for field in fields(ModelShape)
    if field.name in ("seq_length", "rope_scaling", "dense_layers", "full_layers", "mtp_layers", *SIZES)
}


@lru_cache(maxsize=256)
def _kind_of_layers(shape: ModelShape) -> tuple[int, ...]:
    differ = _differ(shape)
    order = list(dict.fromkeys(differ))
    return *map(order.index, differ), *[len(order)] * shape.mtp_layers


def _differ(shape: ModelShape) -> list[tuple[bool, bool]]:
    """Whether each layer is dense, and whether it attends to all tokens, where others do not."""
    return [(index in shape.dense_layers, index in shape.full_layers) for index in range(shape.main_layers)]


@lru_cache(maxsize=256)
def _kinds(shape: ModelShape) -> tuple[ModelShape, ...]:
    plain = replace(shape, dense_layers=(), full_layers=(), mtp_layers=0)
    without: dict[str, Any] = {name: YOUNG[name] for name in EXPERTS} | {"router_aux_loss_coef": 0.0}
    kinds = []
    for (dense, full), layers in Counter(_differ(shape)).items():
        changed: dict[str, Any] = without if dense else {}
        if full:
            changed = changed | {name: YOUNG[name] for name in LOCAL}
        elif linear := shape.linear:
            heads = linear.num_key_heads
            changed = changed | {"heads": heads, "kv_heads": heads, "own_head_dim": linear.key_head_dim}
        kinds.append(replace(plain, layers=layers, **changed))
    mtp = replace(plain, layers=shape.mtp_layers, mtp_layers=shape.mtp_layers)
    return *kinds, *([mtp] if shape.mtp_layers else [])


@lru_cache(maxsize=256)
def _embedding(shape: ModelShape) -> LayerKind:
    return LayerKind((embedding(shape.hidden_size, shape.vocab_size),))


@lru_cache(maxsize=256)
def _head(shape: ModelShape) -> LayerKind:
    biased = shape.mlp_bias and shape.traits.biased_head
    return LayerKind(tuple(lm_head(shape.hidden_size, shape.vocab_size, biased)))


@lru_cache(maxsize=256)
def _block(shape: ModelShape) -> LayerKind:
    assert not shape.dense_layers + shape.full_layers and shape.mtp_layers in (0, shape.layers), "shape.of(index).block"
    hidden, traits, mixture = shape.hidden_size, shape.traits, shape.traits.mixture
    if mixture is None or not shape.experts:
        behind = [mlp("mlp", hidden, shape.intermediate_size, shape.mlp_bias)]
    else:
        behind = [router(mixture, hidden, shape.experts, shape.experts_per_token)]
        behind += shared_expert(mixture, hidden, shape.shared_size, shape.mlp_bias) if shape.shared_size else ()
    if shape.linear:
        attention = delta_attention(hidden, shape.linear)
    elif shape.latents:
        attention = latent_attention(hidden, shape.heads, shape.latents)
    else:
        attention = plain_attention(
            *(hidden, shape.heads, shape.kv_heads, shape.head_dim),
            bias=traits.qkv_bias or shape.qkv_bias or shape.attention_bias,
            output_bias=shape.attention_bias,
            normed=shape.normed_heads,
            gated=traits.gated,
            sinks=traits.sinks,
        )
    return LayerKind((attention, *behind, norms(traits.norms, hidden), *([mtp(hidden)] if shape.mtp_layers else [])))


@lru_cache(maxsize=256)
def _routed(shape: ModelShape) -> LayerKind:
    mixture, inner = shape.traits.mixture, shape.expert_size
    if mixture is None or not inner:
        return LayerKind(())
    return LayerKind((routed_experts(mixture, shape.experts, shape.hidden_size, inner),))


@lru_cache(maxsize=256)
def _layer(shape: ModelShape) -> LayerKind:
    return LayerKind((*shape.block.sublayers, *shape.routed.sublayers)) if shape.experts else shape.block


def flops_per_token(
    shape: ModelShape, seq_length: int, frozen: bool = False, document_tokens: float | None = None
) -> float:
    """Floating-point operations of a token, forward and backward, recompute left out, as MFU counts.
    6 for each weight that tokens are multiplied with and 12 * layers * hidden * sequence for attention's two products
    (PaLM, arXiv:2204.02311, appendix B), half of them for each: full attention, of which a causal kernel computes half;
    of a window twice the pairs that it has, and of linear attention all that its kernels compute.
    The embedding is looked up, not multiplied, unless it is the LM head as well; MTP multiplies with the head again.
    `frozen` weights, under adapters, count 4 instead of 6: they have no gradients. `document_tokens`: of a token's
    document in packed rows, in which attention stays.
    """
    table = shape.vocab_size * shape.hidden_size
    looked_up = (0 if shape.tied_embeddings else table) - shape.mtp_layers * table
    seen = min(seq_length, document_tokens or seq_length)
    attention = 0.0
    for kind in shape.kinds:
        products = 12 * kind.pairs(seen) * (kind.q_width + kind.context_width)
        attention += kind.layers * (products + 3 * sum(sublayer.flops for sublayer in kind.block.sublayers))
    return (4 if frozen else 6) * (shape.active_parameters - looked_up) + attention


def kinds_of(model: ModelShape | Sequence[ModelShape]) -> tuple[ModelShape, ...]:
    """The kinds of all layers of a model, which is one shape or one a layer type, as they are measured: an MTP layer as
    the one behind which it is."""
    shapes = (model,) if isinstance(model, ModelShape) else model
    return tuple(kind for shape in shapes for kind in shape.having(shape.main_layers, 0).kinds)


def layer_types_of(shapes: Sequence[ModelShape]) -> tuple[int, ...]:
    """The index in the kinds of all shapes of each layer's kind."""
    types: list[int] = []
    first = 0
    for shape in shapes:
        types += [first + kind for kind in shape.kind_of_layers]
        first += len(shape.kinds)
    return tuple(types)


def joint_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of a model of one or several layer types; of one, its own."""
    return models[0].fingerprint if len(models) == 1 else _short_hash([model.fingerprint for model in models])


def measured_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of all fields that measurements of layers and vocabulary depend on: not the number of layers, the
    positions and the length of samples, which are keys of measurements."""
    names = ("family", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size", "tied_embeddings")
    return _short_hash(
        [
            [fields[name] for name in names] + [[name, fields[name]] for name in SIZES if fields[name] != YOUNG[name]]
            for fields in map(asdict, models)
        ]
    )


def _short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
