"""Fine-tuning by PaddleNLP's names: on which conversations, and how they become rows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ..base.limits import Size
from .group import Options

Kind = Literal["pretrain", "sft", "lora", "dpo"]
Packing = Literal["none", "in_order", "greedy", "best_fit"]
EITHER = {"task", "tokenizer_name_or_path"}  # pretraining's, too, whose data bring their tokens


class TuningOptions(Options):
    """What is trained on which samples."""

    task: Kind = Field(
        "pretrain", description="pretrain, or sft: fine-tune all weights on dataset_name_or_path, from the model's own"
    )
    dataset_name_or_path: Path | None = Field(
        None, description="folder with train.json and dev.json, or train/*.json and dev/*.json: a JSON object a line"
    )
    tokenizer_name_or_path: Path | None = Field(
        None, description="folder of the tokenizer, or its tokenizer.json; unset: the model's"
    )
    src_length: Size = Field(1024, description="most tokens of what is asked; the rest is cut")
    chat_template: str | None = Field(
        None,
        description="chat_template.json, a Jinja file or a folder with one; plain: none; unset: the tokenizer's own",
    )
    autoregressive: bool = Field(False, description="1: learn all tokens, also of what is asked")
    packing: Packing | None = Field(
        None,
        description="which samples share a row: none, in_order, greedy (both PaddleNLP's) or best_fit (fullest rows); "
        "attention stays within a sample; unset: as zero_padding says",
    )
    zero_padding: bool = Field(False, description="1: the same as packing in_order")
    greedy_zero_padding: bool = Field(False, description="1: with zero_padding the same as packing greedy")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        fields = type(self).model_fields
        own = [name for name in fields if getattr(self, name) != fields[name].default and name not in EITHER]
        if not self.tunes and own:
            raise ValueError(f"{', '.join(own)}: of fine-tuning, but the task is pretrain; add --task sft")
        if self.tunes and self.dataset_name_or_path is None:
            raise ValueError(f"dataset_name_or_path: missing; {self.task} learns from a folder with train.json")
        if self.zero_padding and self.packing not in (None, self._stock_packing):
            raise ValueError(f"packing: {self.packing} contradicts zero_padding; give one of them")
        return self

    @property
    def tunes(self) -> bool:
        """Whether a model is fine-tuned, on conversations."""
        return self.task != "pretrain"

    @property
    def _stock_packing(self) -> Packing:
        if not self.zero_padding:
            return "none"
        return "greedy" if self.greedy_zero_padding else "in_order"

    @property
    def rows(self) -> Packing:
        """Which samples share a row."""
        return self.packing or self._stock_packing
