"""Sublayers of a model besides attention, with their weights and what backward keeps of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .families import Mixture
from .layer import Again, Fused, Kept, Recompute, Split, Sublayer, Weight, linear


def embedding(hidden: int, words: int) -> Sublayer:
    return Sublayer("embedding", (Weight("embed_tokens.weight", (words, hidden), Split.ROW, padded=True),))


def lm_head(hidden: int, words: int, biased: bool) -> Iterator[Sublayer]:
    """The last norm, and the LM head."""
    yield Sublayer("norm", (Weight("norm.weight", (hidden,)),))
    table = Weight("lm_head.weight", (hidden, words), Split.COLUMN, padded=True, linear=True)
    bias = Weight("lm_head.bias", (words,), Split.COLUMN, padded=True)
    yield Sublayer("LM head", (table, bias) if biased else (table,))


def routed_experts(mixture: Mixture, experts: int, hidden: int, inner: int) -> Sublayer:
    """The routed experts. A row is a token of one expert; ranks that split the expert have the whole row."""
    gate, up, down = mixture.projections
    weights = []
    for expert in range(experts):
        name = f"{mixture.inside}.experts.{expert}"
        expert_weights = (
            *linear(f"{name}.{gate}", hidden, inner, Split.COLUMN, bias=mixture.biased),
            *linear(f"{name}.{up}", hidden, inner, Split.COLUMN, bias=mixture.biased),
            *linear(f"{name}.{down}", inner, hidden, Split.ROW, bias=mixture.biased),
        )
        weights += [replace(weight, expert=expert) for weight in expert_weights]
    kept = Kept(tokens=hidden, split=3 * inner)
    return Sublayer("experts", tuple(weights), kept, divided=(("columns of an expert", inner, False),))


def mlp(name: str, hidden: int, inner: int, bias: bool = False) -> Sublayer:
    """Gate and up, their product, and down."""
    return Sublayer(
        "MLP",
        (
            *linear(f"{name}.gate_proj", hidden, inner, Split.COLUMN, bias=bias),
            *linear(f"{name}.up_proj", hidden, inner, Split.COLUMN, bias=bias),
            *linear(f"{name}.down_proj", inner, hidden, Split.ROW, bias=bias),
        ),
        Kept(split=3 * inner),
        again=(
            Again(Recompute.MLP, Kept(split=2 * inner), flops=4 * hidden * inner),
            Again(Recompute.NORMS | Recompute.MLP, Kept(split=inner)),
            Again(Recompute.SUBLAYER, Kept(split=3 * inner), flops=6 * hidden * inner),
        ),
        divided=(("columns of the MLP", inner, False),),
    )


def router(mixture: Mixture, hidden: int, experts: int, chosen: int) -> Sublayer:
    """The router: fp32 scores of a rank's tokens for each expert, and numbers and positions of the chosen experts."""
    inside = mixture.inside
    weights = [*linear(f"{inside}.{mixture.router}", hidden, experts, Split.OWN, bias=mixture.biased)]
    if mixture.bias:
        rows = () if mixture.bias.startswith("gate.") else (1,)  # ERNIE's has a row for each modality: text alone
        weights.append(Weight(f"{inside}.{mixture.bias}", (*rows, experts), state=True))
    kept = Kept(scalars=experts + 4 * chosen)
    again = Again(Recompute.SUBLAYER, kept, flops=2 * hidden * experts)
    return Sublayer("router", tuple(weights), kept, again=(again,))


def shared_expert(mixture: Mixture, hidden: int, size: int, bias: bool) -> Iterator[Sublayer]:
    """The shared expert, which processes all tokens, weighted by its gate if it has one."""
    name = f"{mixture.inside}.{mixture.shared}"
    yield mlp(name, hidden, size, bias)
    if mixture.gated:
        gate = Weight(f"{name}_gate.weight", (hidden, 1), linear=True)
        kept = Kept(tokens=hidden)
        yield Sublayer("gate", (gate,), kept, again=(Again(Recompute.SUBLAYER, kept, flops=2 * hidden),))


def norms(names: Sequence[str], hidden: int) -> Sublayer:
    """Norms before attention and before the MLP. Each keeps its input, the normalized input, one scale, and its output,
    which column-split products gather again in backward."""
    weights = tuple(Weight(f"{name}.weight", (hidden,)) for name in names)
    behind = len(names) - 2  # norms after attention and after the MLP, whose output no product reads
    sized = Kept(tokens=2 * hidden)  # the normalized input; the fused kernel recomputes it
    read = Kept(tokens=2 * hidden, scalars=2)
    again = Again(Recompute.NORMS, read), Again(Recompute.NORMS, sized, unless=Fused.NORMS)
    kept = Kept(tokens=(4 + 2 * behind) * hidden, scalars=behind) + read
    return Sublayer("norms", weights, kept, ((Fused.NORMS, Kept(tokens=(2 + behind) * hidden)),), again)


def mtp(hidden: int) -> Sublayer:
    """In front of an MTP layer the norms of the next token's embedding and of the hidden state, and the projection of
    both, [embedding, hidden]; behind it the norm of its own that the LM head reads. DeepSeek-V3, arXiv:2412.19437,
    section 2.2. The report leaves open the order and whether the hidden state is behind the model's last norm, and
    transformers 5.24 has no such layer: both are as vLLM serves the published weights (models/deepseek_mtp.py at
    03356f8c, whose input is the normed state of deepseek_v2.py); Megatron-LM trains in the same order
    (core/transformer/multi_token_prediction.py at 13f8f526)."""
    scales = [Weight(f"{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm")]
    [projection] = linear("eh_proj", 2 * hidden, hidden, Split.WHOLE)
    # Each norm keeps its input, that over its size, and one scale; the projection its input.
    kept, sized = Kept(tokens=8 * hidden, scalars=3), Kept(tokens=3 * hidden)
    return Sublayer("MTP", (*scales, replace(projection, large=True)), kept, ((Fused.NORMS, sized),))
