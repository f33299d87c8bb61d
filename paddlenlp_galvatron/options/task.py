"""The task of a training, and the data set on whose document lengths its price depends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

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
