"""Inputs and results of the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from operator import add
from typing import Any, NamedTuple

from ..plan.schedule import ByKind, PassKind
from ..plan.strategy import IMBALANCE, IMBALANCE_BOUND, Load, Plan
from ..profiles.analytic import GROUPED, ExpertKernels
from ..profiles.compute_time import ComputeTimes
from ..profiles.data_sheet import Device
from ..profiles.files import ProfileFile, device_of
from ..profiles.memory_use import MemoryUse
from ..profiles.network import Network
from ..profiles.reserve import MeasuredReserve, Reserve, reserve_of
from .simulate import StageTimes


@dataclass(frozen=True, slots=True)
class Profiles:
    """One cluster and one model, measured or derived."""

    network: Network
    times: ComputeTimes
    memory: MemoryUse
    device: Device  # every rank's device
    cluster: tuple[int, int] | None = None  # nodes, GPUs per node; None: those on which the network was measured

    @classmethod
    def of(cls, network: Network, times: ComputeTimes, memory: MemoryUse) -> Profiles:
        """Profiles and the device that they name."""
        return cls(network, times, memory, device_of(network.profile.meta, times.profile.meta, memory.profile.meta))

    @property
    def num_nodes(self) -> int:
        return self.cluster[0] if self.cluster else self.network.profile.num_nodes

    @property
    def gpus_per_node(self) -> int:
        return self.cluster[1] if self.cluster else self.network.profile.gpus_per_node

    @property
    def files(self) -> tuple[ProfileFile, ...]:
        """The paths of the profiles' files."""
        return (*self.network.profile.files, *self.times.profile.files, *self.memory.profile.files)

    @property
    def reserve(self) -> Reserve:
        """Memory of its devices outside tensors; none where no profile names a GPU."""
        measured = MeasuredReserve.of(self.network.profile.meta, self.memory.profile.meta)
        return reserve_of(self.device, self.num_nodes * self.gpus_per_node, measured)


@dataclass(frozen=True, slots=True)
class Task:
    """The trained weights and the additional models to compute. The default trains all weights."""

    adapter_rank: int | None = None  # LoRA in every projection of the layers, all other weights frozen; None: no LoRA
    document_tokens: float | None = None  # mean length of a token's document, which bounds attention

    @property
    def frozen(self) -> bool:
        return self.adapter_rank is not None

    def notes(self, experts: bool) -> list[str]:
        """Notes for the user on memory that adapters do not save."""
        kept = "adapters save gradients and optimizer states, not activations: experts keep theirs as without adapters"
        return [kept] if self.frozen and experts else []

    def seen(self, seq: int) -> float:
        """Share of a causal row's pairs of tokens that attention computes."""
        return min(1.0, self.document_tokens / seq) if self.document_tokens else 1.0


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Options of the user besides the plan's assumptions."""

    context_mib: float = 0.0  # reserve of every device: CUDA context, fragmentation, other programs
    # Share of freed working memory that the allocator keeps, in addition to the reserve; None: memory counts only
    # tensors.
    freed: float | None = None
    global_memory_buffer: bool = True  # Megatron-SP: room for the gathered activations of one layer
    task: Task = Task()
    imbalance: float = IMBALANCE  # experts' rows of the busiest rank / mean, for times
    imbalance_bound: float = IMBALANCE_BOUND  # the same, for the bound of memory
    kernels: ExpertKernels = GROUPED  # experts' kernels
    padded: bool = False  # whether experts' rows are padded in pipelines on GPUs, as our runtime does
    in_place: bool = True  # losses use the logits' memory, as in our runtime. False only for published runs
    # Megatron-SP that keeps gathered inputs of products until backward and overlaps no collective, as in PaddlePaddle
    # and nanotron. Priced only, for published runs.
    keeps_gathered: bool = False
    overlaps: bool = True  # tp and dp collectives overlap with backward, unlike in older software. Priced only
    # Fused weight-gradient accumulation, as in Megatron-LM with Transformer Engine. Priced only.
    fused_gradients: bool = False
    keeps_keys: bool = True  # context parallelism keeps other ranks' keys and values; rings and all-to-alls do not
    # The first update of an offloaded optimizer has all fp32 weights on the device, as in PaddlePaddle. Priced only.
    masters_first: bool = False

    @property
    def load(self) -> Load:
        return Load(self.imbalance, self.imbalance_bound)


class StageSetting(NamedTuple):
    """Sizes of a stage and its micro-batches on which prices depend."""

    stage_size: int  # ranks
    micro_batch: int  # samples, over the whole stage
    micro_batches: int  # micro-batches of a step
    pipeline: int  # stages

    @classmethod
    def of(cls, plan: Plan) -> StageSetting:
        """The setting of any stage of a plan."""
        return cls(plan.stage_size, plan.micro_batch, plan.micro_batches, plan.pipeline)


class States(NamedTuple):
    """Model states and masks of a module on a rank, held between micro-batches, in MiB."""

    parameters_mib: float = 0.0
    gradients_mib: float = 0.0
    moments_mib: float = 0.0  # optimizer moments and the fp32 copy of 16-bit weights
    masks_mib: float = 0.0  # attention masks, and messages between stages


class PassTerms(NamedTuple):
    """The terms of one pass of a micro-batch, in ms, in the order in which they are added up."""

    compute_ms: float = 0.0
    recompute_ms: float = 0.0
    gather_ms: float = 0.0  # ZeRO-3's weights
    reduce_ms: float = 0.0  # gradients that are reduced after each micro-batch
    tensor_ms: float = 0.0  # collectives of tensor and context parallelism and Ulysses
    expert_ms: float = 0.0  # messages of expert parallelism
    offload_ms: float = 0.0  # copies of activations to host memory and back, beyond the pass

    def __add__(self, other: PassTerms) -> PassTerms:  # type: ignore[override]
        """The sum of the terms of two modules."""
        return PassTerms(*map(add, self, other))


class Terms(NamedTuple):
    """The terms of a cost. Communication counts as far as it is not hidden behind compute."""

    states: States
    passes: ByKind[PassTerms] = ByKind(PassTerms(), PassTerms())
    # Each micro-batch, ms, hidden by compute.
    gather_hidden_ms: float = 0.0
    tensor_hidden_ms: float = 0.0
    # Once a step, ms.
    reduce_ms: float = 0.0  # gradients that are not reduced after each micro-batch
    reduce_hidden_ms: float = 0.0  # hidden by compute; each micro-batch where gradients are reduced then
    reduced_each: bool = False
    finish_ms: float = 0.0  # gradients that are reduced after all backward passes
    publish_ms: float = 0.0  # ZeRO-2's updated weights
    optimizer_ms: float = 0.0

    def __add__(self, other: Terms) -> Terms:  # type: ignore[override]
        """The sum of the terms of two modules that reduce gradients at the same time."""
        states, passes = States(*map(add, self.states, other.states)), ByKind(*map(add, self.passes, other.passes))
        return Terms(*map(add, self, other))._replace(states=states, passes=passes, reduced_each=self.reduced_each)


NOTHING = Terms(States())


class Workspace(NamedTuple):
    """Transients during a module's backward, in MiB. A stage counts the largest of each term over its modules: during
    one module's backward, its neighbours' messages are in flight and weights are fetched."""

    own_mib: float = 0.0  # recompute's whole layer, gathered weights, gradients and the buffer that joins them
    message_mib: float = 0.0  # gradients that are being reduced while the next module works
    fetched_mib: float = 0.0  # ZeRO-3's weights and offloaded activations, during the following module's backward
    tables_mib: float = 0.0  # tables of positions under context parallelism

    @classmethod
    def of(cls, several: Iterable[Workspace]) -> Workspace:
        """The largest of each term."""
        return cls(*map(max, zip(cls(), *several, strict=True)))

    @property
    def total_mib(self) -> float:
        return sum(self)


class PartMemory(NamedTuple):
    """Memory of one part of a stage, a layer or vocabulary layers, on a rank, in MiB."""

    fixed_mib: float = 0.0  # all the time: weights, optimizer states, masks
    gradient_mib: float = 0.0  # gradients before their reduction
    kept_mib: float = 0.0  # the same gradients after their reduction
    late_mib: float = 0.0  # unreduced gradients, reduced only at the end of the step (a tied embedding)
    activation_mib: float = 0.0  # one micro-batch in flight
    working_mib: float = 0.0  # backward's peak above the memory in use
    made_mib: float = 0.0  # gradients already produced when the first backward reaches its peak
    gathered_mib: float = 0.0  # ZeRO-3's gathered weights while the part runs
    joined_mib: float = 0.0  # buffer in which gradients are reduced
    host_mib: float = 0.0  # optimizer states in host memory
    away_mib: float = 0.0  # a micro-batch's activations in host memory
    # In the first update, where it has all fp32 weights on the device:
    master_mib: float = 0.0  # fp32 weights
    matrix_mib: float = 0.0  # moments of its largest matrix

    def __add__(self, other: PartMemory) -> PartMemory:  # type: ignore[override]
        """The sum of the memory of two halves of a part."""
        return PartMemory(*map(add, self, other))

    @property
    def shard_mib(self) -> float:
        """MiB of a gradient message that stay until the whole message has been reduced."""
        return self.kept_mib + self.joined_mib - self.gradient_mib if self.kept_mib < self.gradient_mib else 0.0

    @property
    def late(self) -> float:
        """Share of the gradients that are reduced at the end of the step."""
        return self.late_mib / self.gradient_mib if self.late_mib else 0.0


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer (or of the vocabulary layers of one stage) on the rank that has most of it."""

    passes_ms: ByKind[float]  # one micro-batch, with recompute and exposed communication
    sync_ms: float  # after the last micro-batch's backward: gradient reduction and optimizer step
    states_mib: float  # weights, gradients, optimizer states
    activation_mib: float  # per micro-batch in flight
    workspace: Workspace
    terms: Terms = field(default=NOTHING, compare=False, repr=False)
    memory: PartMemory | None = field(default=None, compare=False, repr=False)  # None: only bounded

    @classmethod
    def of(
        cls, terms: Terms, activation_mib: float, workspace: Workspace, memory: PartMemory | None = None
    ) -> LayerCost:
        """The sums of all terms."""
        return cls(
            ByKind(*map(sum, terms.passes)),
            terms.finish_ms + terms.publish_ms + terms.optimizer_ms + terms.reduce_ms,
            sum(terms.states),
            activation_mib,
            workspace,
            terms,
            memory,
        )

    def behind_copies(self, mib_per_ms: float) -> LayerCost:
        """The same cost with activations offloaded after the layer's forward and fetched before its backward."""
        assert self.memory
        copies_ms = self.memory.away_mib / mib_per_ms
        beyond_ms = (max(copies_ms - pass_ms, 0.0) for pass_ms in self.passes_ms)
        passes = (each._replace(offload_ms=ms) for each, ms in zip(self.terms.passes, beyond_ms, strict=True))
        terms = self.terms._replace(passes=ByKind(*passes))
        return LayerCost.of(terms, self.activation_mib, self.workspace, self.memory)

    def __add__(self, other: LayerCost) -> LayerCost:
        """The sum of both halves of a layer, whose transients may coincide."""
        return LayerCost.of(
            self.terms + other.terms,
            self.activation_mib + other.activation_mib,
            Workspace(*map(add, self.workspace, other.workspace)),
            self.memory and other.memory and self.memory + other.memory,
        )


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak of one stage, in MiB, by term. The search limits the total, an upper bound: not all terms peak at once."""

    context_mib: float
    states_mib: float
    activations_mib: float  # all micro-batches in flight
    working_mib: float  # the workspace
    estimate_mib: float | None = None  # of tensors, from a walk through the step; None: only bounded
    apart_mib: float = 0.0  # with `masters_first`: tensors, if update and backward share no blocks
    host_mib: float = 0.0  # in host memory: optimizer states and activations, not in the other terms

    @property
    def tensors_mib(self) -> float:
        """The estimate without the reserve."""
        bound = self.total_mib - self.context_mib
        return bound if self.estimate_mib is None else min(self.estimate_mib, bound)

    def allocator_mib(self, reserve: Reserve) -> float:
        """Upper bound of the allocator's memory."""
        return reserve.allocator_mib(max(self.tensors_mib, self.apart_mib), self.working_mib)

    @property
    def total_mib(self) -> float:
        return self.context_mib + self.states_mib + self.activations_mib + self.working_mib


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted times of one stage for one micro-batch, through all its chunks, in ms, and its memory."""

    passes_ms: ByKind[float]
    sync_ms: float  # time added to the last backward
    send_ms: float  # to the next stage and the gradient back, for all chunks; 0 after the last chunk
    memory: StageMemory
    chunks_ms: tuple[tuple[ByKind[float], float], ...]  # passes and send of each chunk

    def summary(self) -> dict[str, Any]:
        """Times and memory summed over chunks, as JSON values."""
        passes = {f"{kind}_ms": self.passes_ms.of(kind) for kind in PassKind}
        times = {**passes, "sync_ms": self.sync_ms, "send_ms": self.send_ms}
        return {**times, "memory": asdict(self.memory), "memory_mib": self.memory.total_mib}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of one training step of a plan."""

    time_s: float
    samples_per_s: float
    bubble_share: float  # share of all stages' time spent waiting
    stages: tuple[StagePrediction, ...]
    times: StageTimes  # of every chunk of every stage, for the simulation
