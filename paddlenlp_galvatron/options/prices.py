"""The task with its data, the whole training, and the source of the prices of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ..base.limits import Positive, Ranks, Size
from .group import Options

Kind = Literal["pretrain", "sft", "lora", "dpo"]
Packing = Literal["none", "in_order", "greedy", "best_fit"]
RANK = 8  # of adapters, PaddleNLP's


class LengthOptions(Options):
    """The data set whose documents are measured."""

    panel = "Data"

    dataset_name_or_path: Path | None = Field(
        None, description="fine-tuning data, whose documents' lengths are measured; the model must be a folder"
    )
    packing: Packing = Field("none", description="which samples share a row: none, in_order, greedy or best_fit")


class JobOptions(Options):
    """The whole training."""

    panel = "Training"

    tokens: float | None = Field(
        None,
        gt=0,
        le=1e18,
        allow_inf_nan=False,
        description="tokens of an epoch, for days and cost; unset: those of dataset_name_or_path",
    )
    num_train_epochs: Positive = Field(1.0, description="how often the tokens are trained on")
    price_per_gpu_hour: Positive | None = Field(None, description="price of a GPU for an hour, in any currency")
    save_gb_per_s: Positive | None = Field(
        None, description="GB/s at which the storage takes a checkpoint from all ranks together"
    )


TWO_SOURCES = "device: profiles say which one it is; leave one of them out"


class PriceOptions(Options):
    """The source of a plan's prices. Every command that prices a plan's file takes all of them."""

    profiles: Path | None = Field(None, description="folder of the profile files; unset: the one that the plan names")
    device: str | None = Field(None, description="price by this data sheet (h100, or a file); unset: as in the plan")
    model_size: str | None = Field(
        None, description="a preset's name, a config.json, or its folder; unset: the plan's model"
    )
    memory_constraint: Positive | None = Field(None, description="memory of a GPU, GiB; unset: as in the plan")
    num_gpus_per_node: Ranks | None = Field(None, description="GPUs per node; unset: as in the plan, or 8")
    task: Kind | None = Field(
        None, description="the task: pretrain, sft, lora or dpo; unset: that of the plan's search"
    )
    lora_rank: Size | None = Field(
        None, description=f"rank of the adapters; unset: as the plan names it, or {RANK} with lora"
    )

    @model_validator(mode="after")
    def _of_one_source(self) -> Self:
        if self.profiles and self.device:
            raise ValueError(TWO_SOURCES)
        return self
