"""Every option of a validation, under one canonical name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ..base.limits import Port, Positive, Rank, Ranks, Rate, Samples, Seed, Size
from ..launch.nodes import LOOPBACK, ONE_NODE, Nodes
from ..options.group import Options
from ..plan import Precision

MOST_PLANS, MOST_BUDGETS, MOST_STEPS = 10_000, 100, 1000


def _listed(value: Any) -> Any:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


class ValidateOptions(Options):
    """What is run, on what, and what is demanded."""

    model_size: str = Field(description="a preset's name, a config.json, or its folder")
    profiles: Path = Field(Path("configs"), description="folder of the profile files, of as many ranks as are started")
    output: Path = Field(
        Path("runs/validate"), description="folder of the journal, validation.json and validation.html"
    )
    num_nodes: Ranks = Field(1, description="nodes; start the same command on each")
    nproc: Ranks = Field(2, description="ranks of a node; on CPU processes, pinned where each has a processor")
    node_rank: Rank = Field(0, description="which node this is")
    master_addr: str | None = Field(None, description="address of node 0")
    master_port: Port | None = Field(None, description="free port of node 0")

    count: int = Field(24, ge=0, le=MOST_PLANS, description="plans drawn across the space")
    seed: Seed = Field(0, description="of the plans that are drawn, and of the data")
    plans: Annotated[tuple[Path, ...], BeforeValidator(_listed)] = Field((), description="plan files, a.json,b.json")
    budgets: int = Field(
        0, ge=0, le=MOST_BUDGETS, description="memory budgets at which the searched plan meets its rivals, for regret"
    )
    global_train_batch_size: Samples = Field(8, description="samples of a step")
    seq_length: Size | None = Field(None, description="tokens of a sample; unset: the model's positions")
    sequence_parallel: bool = Field(True, description="Megatron-SP in every layer with tp > 1")
    mixed_precision: Precision = Field(Precision.FP32, description="type of weights and activations")
    no_async_grad_reduce: bool = Field(False, description="gradients are reduced after every micro-batch")
    steps: int = Field(14, ge=3, le=MOST_STEPS, description="timed steps of a plan at most, of which one counts")
    minutes: Positive = Field(10, description="after which no further plan is begun; run again to go on")
    fresh: bool = Field(False, description="run again what was run before")

    most_mean_error: Rate | None = Field(None, description="mean error of the step time that is let pass, as 0.08")
    least_tau: float | None = Field(None, ge=-1, le=1, description="Kendall's tau that is demanded, as 0.85")
    most_memory_error: Rate | None = Field(None, description="peak above the prediction that is let pass, as 0.02")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.count or self.plans or self.budgets):
            raise ValueError("count: 0, and neither plans nor budgets are given: there is nothing to run")
        _ = self.nodes
        return self

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.nproc

    @property
    def nodes(self) -> Nodes:
        """Raises UserError."""
        if self.num_nodes == 1 and not self.node_rank:
            return ONE_NODE
        return Nodes(self.num_nodes, self.node_rank, self.master_addr or LOOPBACK, self.master_port)
