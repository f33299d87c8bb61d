"""The types that describe a layer: weights and their splits, and the bytes and operations of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, Flag
from functools import cached_property, lru_cache
from math import prod


class Split(Enum):
    """The share of a weight that a rank of a tensor-parallel group holds."""

    COLUMN = "its share of the outputs: the last axis"
    ROW = "its share of the inputs, or of a table's rows: the first axis"
    OWN = "replicated, used on own heads or tokens: gradients are partial sums"
    WHOLE = "replicated, used equally on all ranks"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight by the name that it has inside its layer, in PaddleNLP and at Hugging Face."""

    name: str
    shape: tuple[int, ...]  # a linear layer's is [in, out], as PaddleNLP keeps it
    split: Split = Split.WHOLE
    most_parts: int | None = None  # largest number of parts, shared by more ranks: kv heads
    padded: bool = False  # to a multiple of the degree, along the axis that splits
    linear: bool = False  # a linear layer's matrix, which Hugging Face keeps transposed
    large: bool = False  # a matrix that every rank has whole, but ZeRO shards: a projection to latents
    state: bool = False  # fp32 without a gradient: a router's selection bias
    expert: int | None = None  # number of its routed expert, which etp ranks split like tp ranks other weights

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def sharded(self) -> bool:
        """Whether ZeRO shards it: not vectors and small replicated weights such as a router."""
        return len(self.shape) > 1 and (self.axis is not None or self.large)

    @property
    def adapts(self) -> bool:
        """Whether LoRA adapts it: not the router nor the gate of the shared expert, which are linear layers, too."""
        return self.linear and self.sharded

    @property
    def axis(self) -> int | None:
        """The axis that splits."""
        if self.split is Split.COLUMN:
            return len(self.shape) - 1
        return 0 if self.split is Split.ROW else None

    def parts(self, tp: int) -> int:
        """Number of different parts in a tensor-parallel group."""
        return 1 if self.axis is None else min(tp, self.most_parts or tp)

    def padded_length(self, tp: int) -> int:
        """Length of the axis that splits, with padding."""
        assert self.axis is not None
        length = self.shape[self.axis]
        return -(-length // tp) * tp if self.padded else length

    def numbers_on(self, tp: int) -> int:
        """Elements on one rank of a tensor-parallel group."""
        if self.axis is None:
            return self.numbers
        length, parts = self.padded_length(tp), self.parts(tp)
        unit = length // self.most_parts if self.most_parts else 1  # a kv head stays whole
        return self.numbers // self.shape[self.axis] * (length // unit // parts * unit)


def linear(
    name: str, inputs: int, outputs: int, split: Split, *, bias: bool = False, most_parts: int | None = None
) -> Iterator[Weight]:
    """The weights of a linear layer. The bias of one that is split by rows is added once, to the ranks' sum."""
    yield Weight(f"{name}.weight", (inputs, outputs), split, most_parts, linear=True)
    if bias:
        split = Split.COLUMN if split is Split.COLUMN else Split.WHOLE
        yield Weight(f"{name}.bias", (outputs,), split, most_parts)


class Recompute(Flag):
    """Activations of a layer that backward recomputes: none, those of some parts, or all.

    A part ends before the matrix products that read its output; the output is not kept either.
    """

    NONE = 0
    FULL = 1
    NORMS = 2  # both norms, and the MLP's activation function
    ATTENTION = 4  # core attention: its result from q, k and v, after rotary positions
    MLP = 8  # gate, up, and their product by the activation function
    # Only for PaddleFleet's layers, which run a module again up to its output, including collectives:
    SUBLAYER = 16  # its mlp: the MLP, or router, exchange, experts and shared expert
    GATE_UP = 32  # its moe_gate_up: the experts' products by gate and up

    __hash__ = object.__hash__  # members are singletons; hashing by name is slower and frequent in prices

    @property
    def words(self) -> str:
        """The text in plan files: `none`, `norms+mlp`, `full`."""
        return "+".join(str(member.name).lower() for member in self) or "none"

    @classmethod
    def of(cls, words: str) -> Recompute:
        """Parse the text of a plan file, the parts in any order. Raises ValueError."""
        for choice in (cls.NONE, cls.FULL, *PARTLY, *MODULES):
            if sorted(words.split("+")) == sorted(choice.words.split("+")):
                return choice
        parts = " and ".join(", ".join(member.words for member in PARTS).rsplit(", ", 1))
        raise ValueError(f"must be none, full, or those of {parts} that are recomputed, joined by +")


PARTS = (Recompute.NORMS, Recompute.ATTENTION, Recompute.MLP)
MODULES = (Recompute.SUBLAYER, Recompute.GATE_UP)  # a layer has at most one of these
PARTLY = tuple(Recompute(number) for number in range(2, 2 << len(PARTS), 2))  # every choice of parts
# Choices whose bytes and times add up to all others; norms and MLP share the activation function.
TOGETHER = Recompute.NORMS | Recompute.MLP
APART = (*PARTS, TOGETHER)


@lru_cache(maxsize=100)
def apart(recompute: Recompute) -> tuple[Recompute, ...]:
    """The entries of APART that a choice of parts is the sum of; a module is its own."""
    if recompute in MODULES:
        return (recompute,)
    sides = recompute & TOGETHER, *(recompute & member for member in PARTS if member not in TOGETHER)
    return tuple(side for side in sides if side)


class Fused(Flag):
    """Paddle's fused GPU kernels that keep less for backward than plain kernels."""

    NONE = 0
    ATTENTION = 1  # flash attention
    ROPE = 2  # rotary positions
    NORMS = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """Elements per token kept for backward, by their split in a tensor-parallel group."""

    tokens: int = 0  # split like tokens between layers: with Megatron-SP, else whole on every rank
    split: int = 0  # split in any case
    scalars: int = 0  # fp32, split like tokens between layers

    def on(self, tp: int, sequence_parallel: bool) -> float:
        """Numbers on one rank of a group, its scalars left out."""
        return self.split / tp + self.tokens / (tp if sequence_parallel else 1)

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.tokens + other.tokens, self.split + other.split, self.scalars + other.scalars)

    def __sub__(self, other: Kept) -> Kept:
        return Kept(self.tokens - other.tokens, self.split - other.split, self.scalars - other.scalars)


@dataclass(frozen=True, slots=True)
class Again:
    """The activations that a recomputed part saves, and the work of recomputing them."""

    parts: Recompute  # any of them
    spared: Kept
    flops: int = 0  # operations of matrix products, a token
    unless: Fused = Fused.NONE  # the kernel that never keeps it


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Attention, the MLP, the norms, the router or the experts of a layer. For experts, a token is a row of one
    expert."""

    name: str
    weights: tuple[Weight, ...]
    kept: Kept = Kept()  # kept by plain kernels
    unkept: tuple[tuple[Fused, Kept], ...] = ()  # the tensors in `kept` that each fused kernel does not keep
    again: tuple[Again, ...] = ()
    heads: int = 0  # of attention; a probability for every pair of tokens is kept for each, or a sum for every token
    head_dim: int = 0  # 0: its operations are not of pairs of tokens
    # Numbers that a degree must divide, by name: (number, whether more ranks may share).
    divided: tuple[tuple[str, int, bool], ...] = ()
    flops: int = 0  # operations of forward a token, besides products with weights and of pairs of tokens

    @property
    def attends(self) -> bool:
        """Whether it looks at other tokens, so that Ulysses splits it by heads; other parts are split by tokens."""
        return self.heads > 0

    @property
    def pair_flops(self) -> int:
        """Operations of forward for each pair of tokens: scores, and the sum of values."""
        return 4 * self.heads * self.head_dim


@dataclass(frozen=True, eq=False)  # one object a shape: compared and hashed as such, which is quick
class LayerKind:
    """All layers of one kind: embedding, decoder layers, or LM head."""

    sublayers: tuple[Sublayer, ...]

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for sublayer in self.sublayers for weight in sublayer.weights)

    @cached_property
    def projections(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA adapts."""
        return tuple(weight.name for weight in self.weights if weight.adapts)

    @cached_property
    def parameters(self) -> int:
        return sum(weight.numbers for weight in self.weights if not weight.state)

    def kept(self, fused: Fused) -> Kept:
        """Numbers kept by these fused kernels, and plain ones elsewhere."""
        unkept = (less for sublayer in self.sublayers for kernel, less in sublayer.unkept if kernel & fused)
        return sum((sublayer.kept for sublayer in self.sublayers), Kept()) - sum(unkept, Kept())

    @cached_property
    def product_ends(self) -> tuple[Kept, Kept]:
        """Elements per token (or row of experts) that products with split weights read and write. An input of several
        weights counts once."""
        linear = [
            (sublayer.name, weight)
            for sublayer in self.sublayers
            for weight in sublayer.weights
            if weight.linear and weight.sharded and not weight.expert  # one expert stands for all
        ]
        read = {(name, weight.shape[0], weight.split is Split.ROW) for name, weight in linear}
        inputs = (Kept(split=width) if by_row else Kept(width) for _, width, by_row in read)
        outputs = (Kept(end.shape[1]) if end.split is Split.ROW else Kept(split=end.shape[1]) for _, end in linear)
        return sum(inputs, Kept()), sum(outputs, Kept())

    def spared_bytes(self, number_bytes: int) -> Kept:
        """Bytes saved for backward if products read one byte per element. Attention also keeps its result for its own
        backward."""
        (read, _), spared = self.product_ends, number_bytes - 1
        weights = (weight for sublayer in self.sublayers if sublayer.pair_flops for weight in sublayer.weights)
        context = sum(weight.shape[0] for weight in weights if weight.linear and weight.split is Split.ROW)
        return Kept(spared * read.tokens, spared * read.split - number_bytes * context)

    def again(self, recompute: Recompute, fused: Fused) -> tuple[Again, ...]:
        """Everything that backward recomputes for these parts."""
        every = (step for sublayer in self.sublayers for step in sublayer.again)
        return tuple(step for step in every if step.parts & recompute and not step.unless & fused)

    @cached_property
    def heads(self) -> int:
        """Heads of attention to pairs of tokens, over all sublayers."""
        return sum(sublayer.heads for sublayer in self.sublayers if sublayer.head_dim)

    @cached_property
    def pair_flops(self) -> int:
        return sum(sublayer.pair_flops for sublayer in self.sublayers)

    @cached_property
    def _by_name(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.weights}

    def __getitem__(self, name: str) -> Weight:
        return self._by_name[name]
