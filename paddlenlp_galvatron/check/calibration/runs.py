"""A measured run, and its prediction from a data sheet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...cost_model import CostModel, CostOptions, Task, derive
from ...cost_model.costs import IMBALANCE
from ...model import ModelShape
from ...plan import Plan
from ...profiles.analytic import GROUPED, ExpertKernels
from ...profiles.data_sheet import DataSheet


@dataclass(frozen=True)
class MeasuredRun:
    """A run of a plan and its measurements."""

    name: str
    source: str
    device: str  # its data sheet's name, or the beginning of it
    shape: ModelShape
    plan: Plan
    step_s: float
    allocated_mib: float | None = None  # most that tensors held
    reserved_mib: float | None = None  # most that the allocator held
    stage: int | None = None  # whose memory was told; None: the fullest one's
    offload_optimizer: bool = False
    adapter_rank: int | None = None  # rank of the LoRA adapters; None: all weights are trained
    ours: bool = False  # by this project's runtime, which posts the receives of a pipeline ahead
    kept_bytes: Callable[[int, int], float] | None = None  # of layers that are not ours, see `analytic_computation`
    imbalance: float = IMBALANCE  # of experts, as `CostOptions` has it
    kernels: ExpertKernels = GROUPED
    document_tokens: float | None = None  # of packed rows, as `Task` has it


class Expected(NamedTuple):
    """Predictions of a run."""

    step_s: float
    allocated_mib: float
    reserved_mib: float
    bound_mib: float  # the most that a card holds unless it is full


def cost_of(run: MeasuredRun, sheet: DataSheet) -> CostModel:
    """Prices of its model on nodes of this sheet."""
    if not run.ours:
        alone = sheet.receive_coe.model_copy(update={"value": 1.0})
        sheet = sheet.model_copy(update={"receive_coe": alone})
    per_node = min(run.plan.world_size, sheet.gpus_per_node)
    return derive(
        run.shape,
        sheet,
        run.plan.world_size // per_node,
        per_node,
        run.plan.assumed,
        CostOptions(
            offload_optimizer=run.offload_optimizer,
            imbalance=run.imbalance,
            imbalance_bound=run.imbalance,
            kernels=run.kernels,
            task=Task(run.adapter_rank, document_tokens=run.document_tokens),
        ),
        run.kept_bytes,
    )


def expected(run: MeasuredRun, sheet: DataSheet) -> Expected:
    """Raises UserError where the plan cannot be priced."""
    cost = cost_of(run, sheet)
    prediction = cost.predict(run.plan)
    stages = prediction.stages if run.stage is None else prediction.stages[run.stage : run.stage + 1]
    memory = max((stage.memory for stage in stages), key=lambda memory: memory.tensors_mib)
    return Expected(
        prediction.time_s,
        memory.tensors_mib,
        cost.reserve.reserved_mib(memory.tensors_mib, sheet.memory.value * 1024),
        cost.reserve.bound_mib(memory.tensors_mib, memory.offloaded_mib),
    )
