"""The model's shape, and the kinds of layers that a model of that shape is a sequence of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from .families import FAMILIES
from .family import Family
from .layer import Again, Fused, Kept, LayerKind, Recompute, Split, Sublayer, Weight, linear


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder-only transformer whose layers are alike.

    A model of several layer types is a sequence of shapes, one a type, in the order of its layers; its embedding is the
    first one's, its LM head the last one's.
    """

    name: str
    family: str  # one of FAMILIES
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02  # standard deviation of the weights at the start
    attention_dropout: float = 0.0  # plans do not depend on it
    seq_length: int | None = None  # tokens of a sample that these layers see; None: the run's
    own_head_dim: int | None = None  # where it is not hidden_size / heads
    attention_bias: bool = False  # of q, k, v and output, in families that leave it open
    mlp_bias: bool = False
    rope_scaling: tuple[tuple[str, int | float | str], ...] = ()  # as config.json has it; (): plain positions

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden_size // self.heads

    @property
    def q_width(self) -> int:
        """Numbers a token of q, and of what attention puts out."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers a token of k, and of v."""
        return self.kv_heads * self.head_dim

    @property
    def traits(self) -> Family:
        """The traits of its family."""
        return FAMILIES[self.family]

    @property
    def embedding(self) -> LayerKind:
        return _embedding(self)

    @property
    def block(self) -> LayerKind:
        """Its decoder layers."""
        return _block(self)

    @property
    def head(self) -> LayerKind:
        """Last norm and LM head, whose table is the embedding's where the model ties the two."""
        return _head(self)

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer."""
        return self.block.parameters

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        twice = self.embedding.parameters if self.tied_embeddings else 0
        return self.embedding.parameters + self.layers * self.layer_parameters + self.head.parameters - twice

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the vocabulary tables when `tp` ranks split them: the next multiple of tp."""
        return self.embedding.weights[0].padded_length(tp)

    @property
    def fingerprint(self) -> str:
        """Short hash of what planning depends on: equal exactly for shapes that are equal but for their names."""
        told = {key: value for key, value in asdict(self).items() if key not in ("name", "attention_dropout")}
        return _short_hash({key: value for key, value in told.items() if not (key in YOUNG and value == YOUNG[key])})


# Fields that shapes had not from the start: at these values a fingerprint is what it was before them.
YOUNG = {
    field.name: field.default
    for field in fields(ModelShape)
    if field.name in ("seq_length", "own_head_dim", "attention_bias", "mlp_bias", "rope_scaling")
}


@lru_cache(maxsize=256)
def _embedding(shape: ModelShape) -> LayerKind:
    table = Weight("embed_tokens.weight", (shape.vocab_size, shape.hidden_size), Split.ROW, padded=True)
    return LayerKind((Sublayer("embedding", (table,)),))


@lru_cache(maxsize=256)
def _head(shape: ModelShape) -> LayerKind:
    norm = Weight("norm.weight", (shape.hidden_size,))
    table = Weight("lm_head.weight", (shape.hidden_size, shape.vocab_size), Split.COLUMN, padded=True, linear=True)
    return LayerKind((Sublayer("norm", (norm,)), Sublayer("LM head", (table,))))


@lru_cache(maxsize=256)
def _block(shape: ModelShape) -> LayerKind:
    return LayerKind((_attention(shape), _mlp(shape), _norms(shape)))


def _attention(shape: ModelShape) -> Sublayer:
    hidden, q, kv, heads = shape.hidden_size, shape.q_width, shape.kv_width, shape.kv_heads
    biased, traits = shape.attention_bias, shape.traits
    name, bias = "self_attn", traits.qkv_bias or biased
    scales = [Weight(f"{name}.{part}_norm.weight", (shape.head_dim,), Split.HEADS) for part in "qk"]
    # The input of the norms of q and k, the normalized input, and a scale for each head.
    normed, sized = Kept(split=2 * (q + kv) + shape.heads + heads), Kept(split=q + kv)
    repeated = Kept(split=2 * (q - kv))  # plain attention keeps k and v once for each head of q
    return Sublayer(
        "attention",
        (
            *linear(f"{name}.q_proj", hidden, q, Split.COLUMN, bias=bias),
            *linear(f"{name}.k_proj", hidden, kv, Split.COLUMN, bias=bias, most_parts=heads),
            *linear(f"{name}.v_proj", hidden, kv, Split.COLUMN, bias=bias, most_parts=heads),
            *linear(f"{name}.o_proj", q, hidden, Split.ROW, bias=biased),
            *(scales if traits.qk_norm else ()),
        ),
        Kept(split=6 * q + 2 * kv) + (normed if traits.qk_norm else Kept()),
        (
            (Fused.ATTENTION, repeated),
            (Fused.ROPE, Kept(split=2 * (q + kv))),  # q and k in front of it, and with their halves turned
            *([(Fused.NORMS, sized)] if traits.qk_norm else ()),
        ),
        (
            Again(Recompute.ATTENTION, Kept(split=q)),  # what the output projection reads
            Again(Recompute.ATTENTION, repeated, unless=Fused.ATTENTION),  # recomputed, they are kept as they come
        ),
        shape.heads,
        shape.head_dim,
        (("attention heads", shape.heads, False), ("kv heads", heads, True)),
    )


def _mlp(shape: ModelShape) -> Sublayer:
    """Gate and up, their product, and down."""
    hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
    return Sublayer(
        "MLP",
        (
            *linear("mlp.gate_proj", hidden, inner, Split.COLUMN, bias=bias),
            *linear("mlp.up_proj", hidden, inner, Split.COLUMN, bias=bias),
            *linear("mlp.down_proj", inner, hidden, Split.ROW, bias=bias),
        ),
        Kept(split=3 * inner),
        again=(
            Again(Recompute.MLP, Kept(split=2 * inner), flops=4 * hidden * inner),
            Again(Recompute.NORMS | Recompute.MLP, Kept(split=inner)),
        ),
        divided=(("columns of the MLP", inner, False),),
    )


def _norms(shape: ModelShape) -> Sublayer:
    """Before attention and before the MLP: each keeps what comes in, that over its size, one scale, and its output."""
    names, hidden = ("input_layernorm", "post_attention_layernorm"), shape.hidden_size
    weights = tuple(Weight(f"{name}.weight", (hidden,)) for name in names)
    sized = Kept(tokens=2 * hidden)  # what comes in over its size; the fused kernel makes it again
    again = (
        Again(Recompute.NORMS, Kept(gathered=2 * hidden, scalars=2)),
        Again(Recompute.NORMS, sized, unless=Fused.NORMS),
    )
    kept = Kept(tokens=4 * hidden, gathered=2 * hidden, scalars=2)
    return Sublayer("norms", weights, kept, ((Fused.NORMS, sized),), again)


def joint_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of a model of one or several layer types; of one, its own."""
    return models[0].fingerprint if len(models) == 1 else _short_hash([model.fingerprint for model in models])


def measured_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of what measurements of layers and vocabulary depend on: not the number of layers, not the positions
    nor the length of samples, which measurements tell themselves."""
    names = ("family", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size", "tied_embeddings")
    young = ("own_head_dim", "attention_bias", "mlp_bias")
    return _short_hash(
        [
            [getattr(model, name) for name in names]
            + [[name, value] for name in young if (value := getattr(model, name)) != YOUNG[name]]
            for model in models
        ]
    )


def _short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
