"""The trained task, by the options of the commands that price it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..base.limits import Positive, Size
from ..cost_model import CostOptions, Task
from ..cost_model.costs import IMBALANCE, IMBALANCE_BOUND
from ..options.group import Options
from ..options.tuning import RANK, Kind
from ..profiles.analytic import GROUPED, ONE_BY_ONE

Imbalance = Annotated[float, Field(ge=1, le=1e4)]


class TaskOptions(Options):
    """The weights that learn, and the models computed beside them."""

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

    moe_imbalance: Imbalance = Field(
        IMBALANCE, description="rows of the rank whose experts get most, over the mean, by which times are priced"
    )
    moe_imbalance_bound: Imbalance = Field(
        IMBALANCE_BOUND, description="the same for the bound of memory, which a plan must keep within"
    )
    experts_one_by_one: bool = Field(
        False, description="price a rank's experts as run one after the other, not by grouped kernels"
    )

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.lora_rank is not None and self.task not in ("lora", "dpo"):
            raise ValueError(f"lora_rank: {self.task} trains all weights; give --task lora or dpo, or leave it out")
        return self

    @property
    def priced(self) -> CostOptions:
        """The task for the cost model."""
        return CostOptions(
            task=self.trained,
            offload_optimizer=self.offload_optimizer,
            imbalance=self.moe_imbalance,
            imbalance_bound=max(self.moe_imbalance, self.moe_imbalance_bound),
            kernels=ONE_BY_ONE if self.experts_one_by_one else GROUPED,
        )

    @property
    def trained(self) -> Task:
        rank = (self.lora_rank or RANK) if self.task == "lora" else self.lora_rank
        return Task(rank, self.document_tokens)
