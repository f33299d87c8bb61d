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

    model_size: str = Field(description="a preset's name, a config.json, or its folder")
    profiles: Path = Field(
        Path("configs"), description="folder of the profile files, measured with the same number of ranks"
    )
    output: Path = Field(Path("runs/validate"), description="folder for the journal and validation.json")
    num_nodes: Ranks = Field(1, description="number of nodes; start the same command on each")
    nproc: Ranks = Field(2, description="ranks on each node; CPU processes are pinned if there is a processor for each")
    node_rank: Rank = Field(0, description="number of this node, from 0")
    master_addr: str | None = Field(None, description="address of node 0")
    master_port: Port | None = Field(None, description="free port of node 0")

    count: int = Field(24, ge=0, le=MOST_PLANS, description="number of plans to draw from the space")
    seed: Seed = Field(0, description="seed of the drawn plans and of the data")
    plans: Paths = Field((), description="plan files to run as well, such as a.json,b.json")
    global_train_batch_size: Samples = Field(8, description="global batch size")
    seq_length: Size | None = Field(None, description="sequence length; unset: the model's positions")
    sequence_parallel: bool = Field(True, description="Megatron-SP in every layer with tp > 1")
    mixed_precision: Precision = Field(Precision.FP32, description="type of weights and activations")
    no_async_grad_reduce: bool = Field(
        False, description="reduce gradients after every micro-batch instead of once a step"
    )
    task: Literal["pretrain", "lora"] = Field("pretrain", description="the task: pretrain, or lora (adapters)")
    lora_rank: Size | None = Field(None, description=f"rank of the adapters; unset: {RANK} with lora")
    visits: int = Field(
        3,
        ge=1,
        le=MOST_STEPS,
        description="number of times that each plan is run, after all others have had their turn",
    )
    steps: int = Field(
        5, ge=1, le=MOST_STEPS, description="largest number of timed steps of a visit; of 15, the third fastest counts"
    )
    minutes: Positive = Field(
        10, description="minutes after which no further plan is started; the same command again continues"
    )
    fresh: bool = Field(False, description="run everything again instead of continuing")

    most_mean_error: Rate | None = Field(
        None, description="fail if the mean error of step times is above this share, such as 0.08"
    )
    least_tau: float | None = Field(
        None, ge=-1, le=1, description="fail if Kendall's tau, how well plans are ranked, is below this, such as 0.85"
    )
    most_memory_error: Rate | None = Field(
        None, description="fail if a memory peak is above its prediction by more than this share, such as 0.02"
    )

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_variables(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Takes the nodes from variables, as far as options do not name them."""
        return environment_nodes(given={name: values.get(name) for name in FIELDS}) | values

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
