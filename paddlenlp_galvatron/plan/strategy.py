"""Parallel strategies as frozen dataclasses, which every package reads.

Words: the *degree* of a layer is the width of its tensor-parallel or Ulysses axis (`tp_sizes_enc` in files); a
stage of a pipeline owns `world_size / stages` consecutive ranks; *samples* are sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from ..base.units import MIB
from ..model import Fused, Recompute
from .mesh import Axis, Degrees, Mesh
from .precision import NumberTypes, Precision, Products
from .schedule import Schedule

T = TypeVar("T")


# Under ddp, gradients of modules up to this many matrix weights are reduced in one message, to save latency; those of
# larger modules weight by weight, in place.
JOINED_NUMBERS = 8 * MIB
# An offloaded optimizer's states pass through buffers on the device: elements per buffer, as copies of 32 MiB reach the
# bus's speed; buffers, to overlap copies and kernels; states: fp32 weight and two moments.
PART, PLACES, STATES = 8 * MIB, 2, 3


class DataParallel(StrEnum):
    """How the ranks that share a layer's weights keep its model states."""

    DDP = "ddp"  # every rank holds everything
    ZERO2 = "zero2"  # gradients and optimizer states sharded
    ZERO3 = "zero3"  # weights sharded too


def all_sharing(stage_size: int, ranks: int) -> int:
    """Ranks of a stage with the same weights, if `ranks` ranks split them; at least 1."""
    return max(stage_size // ranks, 1)


class Experts(NamedTuple):
    """Parallelism of a layer's experts, on a separate grid of the stage's ranks. Between layers every rank has its own
    tokens, so the two grids are independent."""

    ep: int  # ranks among which experts are divided
    etp: int  # neighbouring ranks that split each expert
    dp_type: DataParallel
    sharding: int | None = None  # ranks over which ZeRO shards them; None: all with the same experts

    def mesh(self, stage_size: int) -> Mesh:
        """How the ranks of a stage are arranged."""
        return Mesh.of(stage_size, (Axis.EXPERT, self.ep), (Axis.EXPERT_TENSOR, self.etp), rest=Axis.EXPERT_DATA)

    @property
    def ranks(self) -> int:
        """Number of ranks that together hold all experts of a layer."""
        return self.ep * self.etp

    def shards(self, stage_size: int) -> int:
        """Ranks over which ZeRO shards on such a stage."""
        return self.sharding or all_sharing(stage_size, self.ranks)


@dataclass(frozen=True, slots=True)
class LayerStrategy(Degrees):
    """Strategy of one transformer layer. Fields of experts apply if the layer has experts."""

    consecutive: bool = True  # ranks of one tp group are neighbours; else strided by the dp degree
    dp_type: DataParallel = DataParallel.DDP  # ddp, zero2 or zero3
    recompute: Recompute = Recompute.NONE  # also True and False: full and none
    ep: int = 1  # ranks among which experts are divided
    etp: int = 1  # ranks that split each expert
    experts_dp_type: DataParallel | None = None  # None: as dp_type
    sharding: int | None = None  # near ranks over which ZeRO shards; None: all with the same weights
    experts_sharding: int | None = None  # the same for its experts
    # Percent of the activations kept for backward (of a recomputed layer: its input) that are in host memory between
    # forward and backward.
    offload: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", Recompute(self.recompute))
        if self.experts_dp_type is self.dp_type:
            object.__setattr__(self, "experts_dp_type", None)

    def having(self, experts: Experts) -> LayerStrategy:
        """The same layer with this strategy of its experts."""
        ep, etp, dp_type, sharding = experts
        return replace(self, ep=ep, etp=etp, experts_dp_type=dp_type, experts_sharding=sharding)

    @property
    def experts(self) -> Experts:
        """The strategy of its experts."""
        return Experts(self.ep, self.etp, self.experts_dp_type or self.dp_type, self.experts_sharding)

    def mesh(self, stage_size: int) -> Mesh:
        return Mesh.of(stage_size, *self.axes, consecutive=self.consecutive)

    def shards(self, stage_size: int) -> int:
        """Ranks over which ZeRO shards on such a stage."""
        return self.sharding or all_sharing(stage_size, self.tp)


@dataclass(frozen=True, slots=True)
class VocabStrategy(Degrees):
    """Strategy of the vocabulary layers: the embedding on the first stage, the LM head on the last."""

    dp_type: DataParallel = DataParallel.DDP
    sharding: int | None = None  # a layer's sharding
    pieces: int = field(default=1, kw_only=True)  # successive pieces of a rank's tokens in LM head and loss

    def piece_sizes(self, tokens: int) -> list[int]:
        """Tokens of each piece of `tokens`."""
        pieces = min(self.pieces, tokens)
        each, more = divmod(tokens, pieces)
        return [each + 1] * more + [each] * (pieces - more)

    def as_layer(self) -> LayerStrategy:
        """The same placement, as a layer's strategy."""
        return LayerStrategy(**self.named, dp_type=self.dp_type, sharding=self.sharding)


Strategy = LayerStrategy | VocabStrategy


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions of a plan's prices; training applies them and refuses a contradicting flag."""

    sequence_parallel: bool = False  # Megatron-SP in every layer with tp > 1
    mixed_precision: Precision = Precision.FP32
    async_grad_reduce: bool = True  # gradients are reduced once, after the last micro-batch
    seq_length: int | None = None  # tokens
    # None: training's default, on for 16-bit runs on GPUs.
    fp32_gradients: bool | None = None  # 16-bit training sums and reduces gradients in fp32
    flash_attention: bool | None = None
    # None: training's default, on for all runs on GPUs.
    fused_rope: bool | None = None
    fused_rms_norm: bool | None = None
    fused_cross_entropy: bool | None = None  # loss over a split vocabulary
    # None: off.
    offload_optimizer: bool | None = None  # its states are in host memory and updated in parts
    products: Products | None = None  # type of layers' products; planned only

    @property
    def number_types(self) -> NumberTypes:
        """Number types of a run on GPUs."""
        return NumberTypes.of(self.mixed_precision, bool(self.fp32_gradients))

    @property
    def fused(self) -> Fused:
        """Fused kernels in an unmeasured layer's price: flash attention unless it is off; unset others follow it."""
        flash = self.flash_attention is not False
        kernels = {Fused.ATTENTION: flash, Fused.ROPE: self.fused_rope, Fused.NORMS: self.fused_rms_norm}
        used = (kernel for kernel, on in kernels.items() if (flash if on is None else on))
        return reduce(Fused.__or__, used, Fused.NONE)

    def unlike(self, other: Assumptions) -> Iterator[tuple[str, Any, Any]]:
        """Name and both values of each difference."""
        for each in fields(self):
            if (ours := getattr(self, each.name)) != (theirs := getattr(other, each.name)):
                yield each.name, ours, theirs

    def completed(self, other: Assumptions) -> Assumptions:
        """These assumptions, with the other's where these are unset."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole parallel strategy. Build it through `plan.file`, `options.uniform` or the search: those validate it."""

    world_size: int  # ranks
    global_batch: int  # samples per optimizer step, over all ranks
    micro_batches: int  # equal micro-batches of a step
    stages: tuple[int, ...]  # layers of each pipeline stage; with several chunks, of each chunk, in the model's order
    layers: tuple[LayerStrategy, ...]  # one for each, in the model's order
    vocab: VocabStrategy = VocabStrategy()  # strategy of embedding and LM head
    schedule: Schedule = Schedule.ONE_F_ONE_B  # 1F1B or GPipe
    chunks: int = 1  # chunks of layers of a stage: the first of every stage, then the second of every stage, …
    default_dp_type: DataParallel = DataParallel.DDP  # the file's choice for layers without zero3
    assumed: Assumptions = Assumptions()  # assumptions of its prices
    stated: frozenset[str] = field(default=frozenset(), compare=False)  # assumptions that the plan's file names itself
    note: str = field(default="", compare=False)  # assumptions that its reader made, in a sentence
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)  # rest of the file's "galvatron" object

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pipeline

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages) // self.chunks

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch, over all ranks of a stage."""
        return self.global_batch // self.micro_batches

    def dp(self, strategy: Strategy) -> int:
        """Degree of data parallelism over samples of a layer with this strategy."""
        return strategy.mesh(self.stage_size).degree(Axis.DATA)

    @property
    def schedule_words(self) -> str:
        """`1F1B`, or `interleaved 1F1B of 2 chunks a stage`."""
        label = self.schedule.label
        return label if self.chunks == 1 else f"interleaved {label} of {self.chunks} chunks a stage"

    def chunk_layers(self, stage: int, chunk: int) -> range:
        """Indices of the layers of a chunk of a stage."""
        number = chunk * self.pipeline + stage
        start = sum(self.stages[:number])
        return range(start, start + self.stages[number])

    @property
    def recomputed(self) -> str:
        """The layers that recompute: `sublayer 0-3, full 7-7`."""
        spans = runs([layer.recompute.words for layer in self.layers])
        return ", ".join(f"{words} {span[0]}-{span[-1]}" for span, words in spans if words != "none") or "none"

    def layer_spans(self, stage: int) -> str:
        """The layers of a stage in words: `0-3`, or `0-3, 8-11` of two chunks."""
        chunks = (self.chunk_layers(stage, chunk) for chunk in range(self.chunks))
        return ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in chunks)

    def is_first(self, stage: int, chunk: int) -> bool:
        """Whether a chunk of a stage has the embedding."""
        return stage == chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether a chunk of a stage has the LM head."""
        return stage == self.pipeline - 1 and chunk == self.chunks - 1

    def stage_layers(self, stage: int) -> list[int]:
        """Indices of all layers of a stage, rising."""
        return [layer for chunk in range(self.chunks) for layer in self.chunk_layers(stage, chunk)]

    def chunk_chain(self, stage: int, chunk: int) -> list[Strategy | None]:
        """Strategies of the parts that pass tokens on in a chunk of a stage: embedding, layers, LM head; None is an
        edge to a neighbour."""
        layers = [self.layers[layer] for layer in self.chunk_layers(stage, chunk)]
        first = self.vocab if self.is_first(stage, chunk) else None
        return [first, *layers, self.vocab if self.is_last(stage, chunk) else None]


def sharded_over_all(plan: Plan) -> Plan:
    """The plan with None for each sharding size that equals all ranks with the same weights."""
    size, layers, vocab = plan.stage_size, list(plan.layers), plan.vocab
    for index, layer in enumerate(layers):
        if layer.sharding == all_sharing(size, layer.tp):
            layers[index] = layer = replace(layer, sharding=None)
        if layer.experts_sharding == all_sharing(size, layer.experts.ranks):
            layers[index] = replace(layer, experts_sharding=None)
    if vocab.sharding == all_sharing(size, vocab.tp):
        vocab = replace(vocab, sharding=None)
    return replace(plan, layers=tuple(layers), vocab=vocab)


# Default rows of the busiest rank / mean: for routers trained with a balance loss, and for the bound of memory.
IMBALANCE, IMBALANCE_BOUND = 1.2, 2.0
# In a pipeline on GPUs each expert's rows are padded to multiples of this (reason: `runtime/grouped.py`): a tile of
# cuBLAS's products, which takes as long when partly filled.
EXPERT_ROWS = 128


def padded_rows(rows: float, experts: int) -> float:
    """Rows of a rank with `experts` experts, with padding: on average half a tile for each."""
    return rows + experts * EXPERT_ROWS / 2


class Load(NamedTuple):
    """The load of experts that prices assume: rows of the busiest rank / mean, by names of options."""

    moe_imbalance: float  # used in times and the memory estimate
    moe_imbalance_bound: float  # used in the memory bound

    def __str__(self) -> str:
        usual, most = self
        return f"expert load imbalance: {usual:g}x for time, {most:g}x for memory"


def load_summary(load: Load | None) -> dict[str, float] | None:
    """`load` of every JSON answer; None: a model without experts, or a plan whose file lacks it."""
    return load and load._asdict()


@dataclass(frozen=True, slots=True)
class Predicted:
    """The file's `galvatron.predicted`."""

    step_s: float | None
    memory_mib: tuple[float, ...]  # peak of tensors of a rank of each stage; empty: not predicted
    reserve_mib: float  # memory of a device outside tensors
    load: Load | None  # load of experts; None: the file has none

    @staticmethod
    def of(plan: Plan) -> Predicted:
        fields = plan.metadata.get("predicted") or {}
        stages = fields.get("stages") or []
        reserve = max((stage.get("memory", {}).get("context_mib", 0.0) for stage in stages), default=0.0)
        memory = tuple(_tensors_mib(stage) for stage in stages if "memory_mib" in stage)
        options = (plan.metadata.get("searched_from") or {}).get("options")
        options = options if isinstance(options, dict) else {}
        load = [ratio for name in Load._fields if isinstance(ratio := options.get(name), int | float) and ratio >= 1]
        planned = Load(*load) if len(load) == len(Load._fields) else None
        return Predicted(fields.get("time_s"), memory if len(memory) == plan.pipeline else (), reserve, planned)


def gap_of(lower_bound_s: float, time_s: float) -> float:
    """The share of the step time by which another plan may be faster."""
    return max(0.0, 1 - lower_bound_s / time_s) if time_s else 0.0


def _tensors_mib(stage: Mapping[str, Any]) -> float:
    """The estimate, or the bound if the file has none."""
    memory = stage.get("memory", {})
    bound: float = stage["memory_mib"] - memory.get("context_mib", 0.0)
    estimate: float | None = memory.get("estimate_mib")
    return bound if estimate is None else min(estimate, bound)


def states_words(dp_type: DataParallel, sharding: int | None) -> str:
    """`zero3`, or `zero3 over 8` of more ranks."""
    return f"{dp_type} over {sharding}" if sharding else str(dp_type)


def runs(values: Sequence[T]) -> Iterator[tuple[range, T]]:
    """Runs of equal neighbours: their indices and the value."""
    start = 0
    for value, group in groupby(values):
        stop = start + len(list(group))
        yield range(start, stop), value
        start = stop
