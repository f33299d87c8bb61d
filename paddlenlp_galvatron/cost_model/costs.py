"""What the cost model is asked under, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """What learns, and what is computed beside it. The default trains all weights."""

    adapter_rank: int | None = None  # LoRA in every projection of the layers, all other weights frozen; None: no LoRA
    reference: bool = False  # a frozen model passes the same samples forward first (DPO)

    @property
    def frozen(self) -> bool:
        return self.adapter_rank is not None

    @property
    def copies(self) -> bool:
        """Whether the reference model has weights of its own. Adapters are only left out of its pass."""
        return self.reference and not self.frozen

    @property
    def forwards(self) -> int:
        """Passes forward of a micro-batch, recompute aside."""
        return 1 + self.reference


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What the user may set beside the plan's assumptions."""

    context_mib: float = 0.0  # reserve of every device: CUDA context, fragmentation, whatever else runs there
    global_memory_buffer: bool = True  # Megatron-SP: room for the gathered activations of one layer
    fp32_gradients: bool = False  # 16-bit training: gradients are kept and reduced in fp32
    task: Task = Task()


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer (or of the vocabulary layers of one stage) on the rank that has most of it."""

    forward_ms: float  # one micro-batch, with all communication in its way
    backward_ms: float  # the same, recompute included
    sync_ms: float  # on top of the last micro-batch's backward: gradient sum and optimizer step
    states_mib: float  # weights, gradients, optimizer states
    activation_mib: float  # held by every micro-batch in flight
    working_mib: float  # largest transient: recompute's whole layer, gathered weights, reduce and gather buffers


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak of one stage, in MiB, by term."""

    context_mib: float
    states_mib: float
    activations_mib: float  # of all micro-batches in flight
    working_mib: float

    @property
    def total_mib(self) -> float:
        return self.context_mib + self.states_mib + self.activations_mib + self.working_mib


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted times of one stage for one micro-batch, in ms, and its memory."""

    forward_ms: float
    backward_ms: float
    sync_ms: float  # on top of the last backward
    send_ms: float  # to the next stage, and the gradient back; 0 on the last
    memory: StageMemory


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one training step of a plan is predicted to take."""

    time_s: float
    samples_per_s: float
    bubble_share: float  # of all stages' time, spent waiting
    stages: tuple[StagePrediction, ...]
