"""The source of a plan's prices, where its file does not say it or another is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ..base.limits import Positive, Ranks, Size
from .group import Options
from .task import RANK, Kind

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
        None, description="what is trained: pretrain, sft, lora or dpo; unset: what the plan was searched for"
    )
    lora_rank: Size | None = Field(
        None, description=f"rank of the adapters; unset: as the plan names it, or {RANK} with lora"
    )

    @model_validator(mode="after")
    def _of_one_source(self) -> Self:
        if self.profiles and self.device:
            raise ValueError(TWO_SOURCES)
        return self
