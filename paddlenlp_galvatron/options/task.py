"""The task of a training, and the data set on whose document lengths its price depends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..base.limits import Positive
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
