"""The task with its data, the whole training, and the source of the prices of a plan."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..base.limits import NodeLinks, Positive, Ranks, Size
from ..base.reading import parse_json, read_text
from ..plan.precision import Products
from .group import Options

Kind = Literal["pretrain", "sft", "lora", "dpo"]
Packing = Literal["none", "in_order", "greedy", "best_fit"]
RANK = 8  # PaddleNLP's default rank of adapters


def _by_name(value: object) -> object:
    """2.5, or a100-80gb=2.5,h20=1.2."""
    if not isinstance(value, str) or "=" not in value:
        return value
    pairs = [entry.partition("=") for entry in value.split(",")]
    if len({name.strip() for name, _, _ in pairs}) < len(pairs):
        raise ValueError("has a name twice")
    return {name.strip(): number for name, _, number in pairs}


def _measured_gb_per_s(value: object) -> object:
    """A number, or train_log.jsonl, whose run has saved checkpoints."""
    if not isinstance(value, str) or not value.endswith(".jsonl"):
        return value
    records = [parse_json(line, value) for line in read_text(value).splitlines()]
    saves = [record for record in records if isinstance(record, dict) and record.get("event") == "saved"]
    if not saves:
        raise ValueError(f"{value} has no saved checkpoint; give a number, in GB/s")
    return sum(save["gb"] for save in saves) / sum(save["seconds"] for save in saves)


Prices = Annotated[Positive | Annotated[dict[str, Positive], Field(min_length=1)], BeforeValidator(_by_name)]
OfNode = Annotated[dict[Literal["node"], Positive], Field(min_length=1)]


class LengthOptions(Options):
    """The data set whose documents are measured."""

    panel = "Data"

    dataset_name_or_path: Path | None = None
    packing: Packing = "none"


class JobOptions(Options):
    """The whole training."""

    panel = "Training"

    tokens: float | None = Field(None, gt=0, le=1e18, allow_inf_nan=False)
    num_train_epochs: Positive = 1.0
    price_per_gpu_hour: Prices | None = None
    save_gb_per_s: Annotated[Positive, BeforeValidator(_measured_gb_per_s)] | None = None
    mtbf_hours: Annotated[Positive | OfNode, BeforeValidator(_by_name)] | None = None
    restart_s: Positive | None = None

    @model_validator(mode="after")
    def _failures_are_complete(self) -> Self:
        if self.mtbf_hours and not self.save_gb_per_s:
            raise ValueError("mtbf_hours: failures lose the time since a checkpoint; give --save_gb_per_s too")
        if self.restart_s and not self.mtbf_hours:
            raise ValueError("restart_s: is the time after a failure; give --mtbf_hours too")
        return self

    def mtbf_of(self, nodes: int, gpus_per_node: int) -> float | None:
        """Mean hours between failures of a cluster; None: unknown."""
        if isinstance(self.mtbf_hours, dict):
            return self.mtbf_hours["node"] / nodes
        return self.mtbf_hours and self.mtbf_hours / (nodes * gpus_per_node)


MEASURED_NETWORK = "network: profiles have it measured; give it with a data sheet (--device) alone"
TWO_SOURCES = "device: profiles say which one it is; leave one of them out"


class LimitOptions(Options):
    """When a search stops. A program that solves mixed-integer problems has the same two."""

    panel = "Search"

    gap: Annotated[float, Field(ge=0, lt=1)] = 1e-3
    time_limit: Positive | None = None


class PriceOptions(Options):
    """The source of a plan's prices. Every command that prices a plan's file takes all of them."""

    profiles: Path | None = None
    device: str | None = None
    network: NodeLinks | None = None
    products: Products | None = None
    model_size: str | None = None
    memory_constraint: Positive | None = None
    num_gpus_per_node: Ranks | None = None
    task: Kind | None = None
    lora_rank: Size | None = None

    @model_validator(mode="after")
    def _of_one_source(self) -> Self:
        if self.profiles and self.device:
            raise ValueError(TWO_SOURCES)
        if self.profiles and self.network:
            raise ValueError(MEASURED_NETWORK)
        return self
