"""The trained task, by the options of the commands that price it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ..base.limits import Size
from ..cost_model import CostOptions, Task
from ..options.group import Options
from ..plan.check import PLANNED_ONLY

Kind = Literal["pretrain", "sft", "lora", "dpo"]
RANK = 16  # of LoRA's adapters, where none is given: PEFT's and LLaMA-Factory's examples


class TaskOptions(Options):
    """The weights that learn, and the models computed beside them."""

    task: Kind = Field(
        "pretrain",
        description="what is trained: pretrain, sft (same cost), lora (adapters) or dpo (beside a reference model)",
    )
    lora_rank: Size | None = Field(
        None,
        description=f"rank of the adapters; unset: {RANK} with lora; if given, dpo trains adapters, not all weights",
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
    def planned_only(self) -> bool:
        """Whether it has a price, and no training yet."""
        return self.task in PLANNED_ONLY

    @property
    def priced(self) -> CostOptions:
        """The task for the cost model."""
        return CostOptions(task=self.trained, offload_optimizer=self.offload_optimizer)

    @property
    def trained(self) -> Task:
        rank = (self.lora_rank or RANK) if self.task == "lora" else self.lora_rank
        return Task(rank, self.task == "dpo")
