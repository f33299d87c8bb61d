"""Latent attention (MLA): queries, keys and values of all heads come from a few numbers a token, the latents.

DeepSeek-V2, arXiv:2405.04434, section 2.1. A head's query and key have a part without positions and one with rotary
positions; the key's part with positions is shared by all heads. Each rank projects its own tokens down to latents, by
weights that every rank has whole, and hands latents over instead of hidden states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .layer import Again, Fused, Kept, Recompute, Split, Sublayer, Weight, linear


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of latent attention, as config.json names them."""

    kv_lora_rank: int  # rank of the latents of keys and values
    q_lora_rank: int  # of those of queries; 0: queries come from the hidden state
    qk_nope_head_dim: int  # width of a head without positions
    qk_rope_head_dim: int  # with positions; of a key all heads share it
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, and of its key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def product_dim(self) -> int:
        """Numbers that the up-projection gives for a head: its key without positions, and its value."""
        return self.qk_nope_head_dim + self.v_head_dim


def latent_attention(hidden: int, heads: int, sizes: Latents) -> Sublayer:
    """Attention of `heads` heads on hidden states of width `hidden`."""
    name, rank, turned = "self_attn", sizes.kv_lora_rank, sizes.qk_rope_head_dim
    q, context = heads * sizes.head_dim, heads * sizes.v_head_dim
    down = [*_down(f"{name}.kv_a_proj_with_mqa", hidden, rank + turned, f"{name}.kv_a_layernorm", rank)]
    queries = "q_b_proj" if sizes.q_lora_rank else "q_proj"
    if sizes.q_lora_rank:
        down += _down(f"{name}.q_a_proj", hidden, sizes.q_lora_rank, f"{name}.q_a_layernorm", sizes.q_lora_rank)
    latents = rank + sizes.q_lora_rank
    # Flash attention takes values as wide as keys, and keeps its output of that width.
    padding = heads * (sizes.head_dim - sizes.v_head_dim)
    fused = q + padding
    return Sublayer(
        "attention",
        (
            *down,
            *linear(f"{name}.{queries}", sizes.q_lora_rank or hidden, q, Split.COLUMN),
            *linear(f"{name}.kv_b_proj", rank, heads * sizes.product_dim, Split.COLUMN),
            *linear(f"{name}.o_proj", context, hidden, Split.ROW),
        ),
        # Norms of latents keep their input, that over its size, one scale, and their output; rotary positions keep
        # both halves of their input; attention q, k, v and its output.
        Kept(
            tokens=3 * latents + 2 * turned,
            split=2 * q + 2 * context + 2 * heads * turned,
            scalars=1 + bool(sizes.q_lora_rank),
        ),
        ((Fused.NORMS, Kept(tokens=latents)), (Fused.ATTENTION, Kept(split=-fused))),
        (
            Again(Recompute.ATTENTION, Kept(split=context + fused)),
            Again(Recompute.ATTENTION, Kept(split=-fused), unless=Fused.ATTENTION),
        ),
        heads,
        sizes.head_dim,
        (("attention heads", heads, False),),
    )


def _down(name: str, hidden: int, outputs: int, norm: str, normed: int) -> Iterator[Weight]:
    """A projection to latents, and their norm."""
    for weight in linear(name, hidden, outputs, Split.WHOLE):
        yield replace(weight, large=True)
    yield Weight(f"{norm}.weight", (normed,))
