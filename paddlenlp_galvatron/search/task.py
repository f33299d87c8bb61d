"""What is trained, by the options of the commands that tell what it costs."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ..base.limits import Positive, Size
from ..cost_model import CostOptions, Task
from ..options.group import Options
from ..options.tuning import RANK, Kind


class TaskOptions(Options):
    """What learns, and what is computed beside it."""

    task: Kind = Field(
        "pretrain",
        description="what is trained: pretrain; sft and dpo (same cost: dpo's reference is a table); lora (adapters)",
    )
    lora_rank: Size | None = Field(
        None,
        description=f"rank of the adapters; unset: {RANK} with lora; if given, dpo trains adapters, not all weights",
    )

    document_tokens: Positive | None = Field(
        None,
        description="packed rows: tokens of the document that a token stands in, on average over rows; unset: as "
        "dataset_name_or_path has them, else all of a row",
    )
    offload_optimizer: bool = Field(
        False, description="keep the optimizer's states in the hosts' memory between updates; planned only"
    )

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.lora_rank is not None and self.task not in ("lora", "dpo"):
            raise ValueError(f"lora_rank: {self.task} trains all weights; give --task lora or dpo, or leave it out")
        return self

    @property
    def priced(self) -> CostOptions:
        """What of it the cost model is told."""
        return CostOptions(task=self.trained, offload_optimizer=self.offload_optimizer)

    @property
    def trained(self) -> Task:
        rank = (self.lora_rank or RANK) if self.task == "lora" else self.lora_rank
        return Task(rank, self.document_tokens)
