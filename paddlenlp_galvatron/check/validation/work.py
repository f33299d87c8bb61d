"""Options of a validation; work and results of its ranks."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...base.limits import Port, Positive, Rank, Ranks, Rate, Samples, Seed, Size
from ...launch.nodes import FIELDS, ONE_NODE, Nodes, environment_nodes
from ...options.group import Options, Paths
from ...options.prices import RANK
from ...plan import ModelShape, Plan, Precision, plan_to_dict

MOST_PLANS, MOST_STEPS = 10_000, 1000


class ValidateOptions(Options):
    """Options of `galvatron validate`."""

    model_size: str
    profiles: Path = Path("configs")
    output: Path = Path("runs/validate")
    num_nodes: Ranks = 1
    nproc: Ranks = 2
    node_rank: Rank = 0
    master_addr: str | None = None
    master_port: Port | None = None

    count: int = Field(24, ge=0, le=MOST_PLANS)
    seed: Seed = 0
    plans: Paths = ()
    global_train_batch_size: Samples = 8
    seq_length: Size | None = None
    sequence_parallel: bool = True
    mixed_precision: Precision = Precision.FP32
    no_async_grad_reduce: bool = False
    task: Literal["pretrain", "lora"] = "pretrain"
    lora_rank: Size | None = None
    visits: int = Field(3, ge=1, le=MOST_STEPS)
    steps: int = Field(5, ge=1, le=MOST_STEPS)
    minutes: Positive = 10
    fresh: bool = False

    most_mean_error: Rate | None = None
    least_tau: float | None = Field(None, ge=-1, le=1)
    most_memory_error: Rate | None = None

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_variables(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Reads the nodes from environment variables where options do not give them."""
        return environment_nodes(options={name: values.get(name) for name in FIELDS}) | values

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.count or self.plans):
            raise ValueError("count: 0, and no plans are given: there is nothing to run")
        if self.lora_rank is not None and self.task != "lora":
            raise ValueError("lora_rank: of adapters, but the task is pretrain; give --task lora")
        _ = self.nodes
        return self

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters; None: all weights learn."""
        return (self.lora_rank or RANK) if self.task == "lora" else None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.nproc

    @property
    def nodes(self) -> Nodes:
        """Raises UserError."""
        if self.num_nodes == 1 and not self.node_rank:
            return ONE_NODE
        return Nodes(self.num_nodes, self.node_rank, self.master_addr or "", self.master_port)


FILE, JOURNAL = "work.json", "validate"
# Quantile of a plan's step times to report: the third of 15. Other work on a host only makes steps longer. On two
# shared processors the median of a plan's steps varied by 6.9 % about its prediction, this quantile by 5 %.
QUICK = 0.14


def key_of(plan: Plan) -> str:
    """Identity of a plan, without its metadata."""
    text = json.dumps(plan_to_dict(replace(plan, metadata={})), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Work(BaseModel):
    """The file that the ranks read."""

    model_config = ConfigDict(frozen=True)

    output: Path  # folder of the journal
    shape: ModelShape
    plans: tuple[dict[str, Any], ...]
    identity: dict[str, Any] = {}  # the journal's key: everything that changes a measurement
    visits: int = 1
    steps: int  # steps of one visit
    seed: int = 0
    seconds: float  # no further plan begins after this time
    ranks_per_node: int
    adapter_rank: int | None = None  # LoRA: only adapters are trained


def visit_of(plan: Plan, number: int) -> str:
    """A visit's name in the journal."""
    return f"{key_of(plan)} {number}"


class Step(BaseModel):
    """One timed step and the traced step after it."""

    seconds: float  # time of the slowest rank
    terms_ms: tuple[dict[str, float], ...]  # traced times of each rank


class Visit(BaseModel):
    """Consecutive steps of a plan."""

    steps: tuple[Step, ...] = ()
    peaks_mib: tuple[float, ...] = ()  # peak of tensors of each rank, without those from before the visit
    reserved_mib: tuple[float, ...] = ()  # allocator's peak of each rank
    beside_mib: tuple[float, ...] = ()  # of each rank: GPU memory outside the allocator; empty: not known
    communicators: int = 0  # on the rank with most, and including the world's
    bytes: dict[str, int] = {}  # sent by collectives in a step, over all ranks
    failed: str = ""  # why it did not run


class MeasuredPlan(BaseModel):
    """Measurements of a plan over all visits."""

    step: Step  # the reported step
    peaks_mib: tuple[float, ...]
    bytes: dict[str, int]
    quickest_s: tuple[float, ...]  # step of each visit

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> Self:
        """The measurements of visits that all succeeded."""
        steps = sorted((step for visit in visits for step in visit.steps), key=lambda step: step.seconds)
        step = steps[round(QUICK * (len(steps) - 1))]
        peaks = tuple(map(max, zip(*(visit.peaks_mib for visit in visits), strict=True)))
        quickest = tuple(min(step.seconds for step in visit.steps) for visit in visits)
        return cls(step=step, peaks_mib=peaks, bytes=visits[0].bytes, quickest_s=quickest)
