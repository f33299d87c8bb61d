"""Every option of a validation, under one canonical name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ...base.limits import Port, Positive, Rank, Ranks, Rate, Samples, Seed, Size
from ...launch.nodes import FIELDS, ONE_NODE, Nodes, environment_nodes
from ...options.group import Options, Paths
from ...options.prices import RANK
from ...plan import Precision

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
        """Takes the nodes from variables, as far as options do not name them."""
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
