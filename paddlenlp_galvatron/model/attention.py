"""Attention, each way of it: plain, of latents, and linear.

Latent attention (MLA), DeepSeek-V2, arXiv:2405.04434, section 2.1: queries, keys and values of all heads come from a
few numbers a token, the latents. A head's query and key have a part without positions and one with rotary positions;
the key's part with positions is shared by all heads. Each rank projects its own tokens down to latents with replicated
weights, and communicates latents instead of hidden states.

Linear attention by the gated delta rule, Gated Delta Networks, arXiv:2412.06464, as Qwen3-Next has it: each head keeps
a state of a fixed size in place of keys and values. Queries, keys and values go through a short convolution, and the
output through a norm with a gate. Kernels process chunks of tokens: all pairs inside a chunk, and the state between
chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .layer import Again, Fused, Kept, Recompute, Split, Sublayer, Weight, linear

CHUNK = 64  # tokens of a chunk: chunk_size of transformers and of flash-linear-attention


def plain_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    bias: bool,
    output_bias: bool,
    normed: bool,
    gated: bool,
    sinks: bool,
) -> Sublayer:
    """Attention of `heads` heads, of which some share keys and values; `bias`: of q, k and v."""
    name, q, kv = "self_attn", heads * head_dim, kv_heads * head_dim
    # The norms of q and k keep their input, the normalized input, and a scale for each head.
    scales = [Weight(f"{name}.{side}_norm.weight", (head_dim,), Split.OWN) for side in "qk" * normed]
    of_norms = Kept(split=2 * (q + kv) + heads + kv_heads) if normed else Kept()
    repeated = Kept(split=2 * (q - kv))  # plain attention keeps k and v for each head of q
    gate = 3 * q * gated  # the gate, its sigmoid, and the product that the output projection reads
    return Sublayer(
        "attention",
        (
            *linear(f"{name}.q_proj", hidden, q * (1 + gated), Split.COLUMN, bias=bias),
            *linear(f"{name}.k_proj", hidden, kv, Split.COLUMN, bias=bias, most_parts=kv_heads),
            *linear(f"{name}.v_proj", hidden, kv, Split.COLUMN, bias=bias, most_parts=kv_heads),
            *linear(f"{name}.o_proj", q, hidden, Split.ROW, bias=output_bias),
            *scales,
            *[Weight(f"{name}.sinks", (heads,), Split.COLUMN)] * sinks,
        ),
        Kept(split=6 * q + 2 * kv + gate) + of_norms,
        (
            (Fused.ATTENTION, repeated),
            (Fused.ROPE, Kept(split=2 * (q + kv))),  # q and k before it, and with rotated halves
            *[(Fused.NORMS, Kept(split=q + kv))] * normed,
        ),
        (
            Again(Recompute.ATTENTION, Kept(split=q)),  # the output projection's input
            Again(Recompute.ATTENTION, repeated, unless=Fused.ATTENTION),  # recompute keeps them once per kv head
        ),
        heads,
        head_dim,
        (("attention heads", heads, False), ("kv heads", kv_heads, True)),
    )


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of latent attention, as config.json names them."""

    kv_lora_rank: int  # rank of the latents of keys and values
    q_lora_rank: int  # of those of queries; 0: queries come from the hidden state
    qk_nope_head_dim: int  # width of a head without positions
    qk_rope_head_dim: int  # width with positions; all heads share that of a key
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


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of linear attention, as config.json names them behind `linear_`."""

    num_key_heads: int
    num_value_heads: int  # a multiple of those of keys
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def value_dim(self) -> int:
        """Elements per token of the values of one key head."""
        return self.value_head_dim * self.num_value_heads // self.num_key_heads


def delta_attention(hidden: int, sizes: DeltaNet) -> Sublayer:
    """Linear attention on hidden states of width `hidden`, split by heads of keys."""
    name, heads, dim, value_dim = "linear_attn", sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
    keys, values = sizes.num_key_heads * dim, heads * value_dim
    convolved, chunks = 2 * keys + values, heads * CHUNK
    # In a chunk, keys with keys and with queries, and their triangles with values twice and with keys; with the state
    # keys, the update, and queries.
    flops = heads * (CHUNK * (6 * dim + 4 * value_dim) + 6 * dim * value_dim)
    return Sublayer(
        "attention",
        (
            *linear(f"{name}.in_proj_qkvz", hidden, convolved + values, Split.COLUMN),
            *linear(f"{name}.in_proj_ba", hidden, 2 * heads, Split.COLUMN),
            Weight(f"{name}.conv1d.weight", (sizes.conv_kernel_dim, convolved), Split.COLUMN),
            Weight(f"{name}.dt_bias", (heads,), Split.COLUMN),
            Weight(f"{name}.A_log", (heads,), Split.COLUMN),
            Weight(f"{name}.norm.weight", (value_dim,), Split.OWN),
            *linear(f"{name}.out_proj", values, hidden, Split.ROW),
        ),
        # The convolution keeps its input, sum and activation; the rule a query and key for each head of values, its
        # triangle and its decays in fp32; the norm the rule's output, its gate and what the output projection reads.
        Kept(split=3 * convolved + 2 * heads * dim + chunks + 4 * heads + 3 * values),
        ((Fused.ATTENTION, Kept(split=convolved)),),  # the kernel recomputes the convolution's sum
        (Again(Recompute.ATTENTION, Kept(split=values + chunks)),),
        heads,
        divided=(("key heads of linear attention", sizes.num_key_heads, False),),
        flops=flops,
    )
