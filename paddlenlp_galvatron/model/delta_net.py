"""Linear attention by the gated delta rule: each head keeps a state of a fixed size in place of keys and values.

Gated Delta Networks, arXiv:2412.06464, as Qwen3-Next has them: queries, keys and values go through a short convolution,
and the output through a norm with a gate. Kernels compute chunks of tokens: pairs of tokens inside each, and the state
between them.
"""

from dataclasses import dataclass

from .layer import Again, Fused, Kept, Recompute, Split, Sublayer, Weight, linear

CHUNK = 64  # tokens of a chunk: chunk_size of transformers and of flash-linear-attention


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
        """Numbers a token of the values of one key head."""
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
        ((Fused.ATTENTION, Kept(split=convolved)),),  # the kernel computes the convolution's sum again
        (Again(Recompute.ATTENTION, Kept(split=values + chunks)),),
        heads,
        divided=(("key heads of linear attention", sizes.num_key_heads, False),),
        flops=flops,
    )
