"""Fine-tuning by PaddleNLP's names: on which conversations, and how they become rows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ..base.limits import Positive, Size
from ..model.lora import Adapters
from .group import Options

Kind = Literal["pretrain", "sft", "lora", "dpo"]
Packing = Literal["none", "in_order", "greedy", "best_fit"]
RANK = 8  # PaddleNLP's
EITHER = {"task", "tokenizer_name_or_path"}  # pretraining's, too, whose data bring their tokens


class TuningOptions(Options):
    """The task, its samples and its adapters."""

    task: Kind = Field(
        "pretrain",
        description="pretrain; sft: fine-tune all weights on dataset_name_or_path, from the model's own; lora: "
        "adapters beside them",
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
    lora: bool = Field(False, description="1: the same as task lora")
    lora_rank: Size | None = Field(None, description=f"rank of LoRA's adapters; unset: {RANK}")
    lora_alpha: Positive | None = Field(
        None, description="LoRA's alpha: adapters count alpha / rank; unset: twice the rank, or 4 with rslora"
    )
    rslora: bool = Field(False, description="1: adapters count alpha / sqrt(rank)")
    lora_plus_scale: Positive = Field(1.0, description="the learning rate of LoRA's B is so many times that of A")
    lora_path: Path | None = Field(
        None, description="adapters to begin with: PEFT's or PaddleNLP's folder, or a checkpoint; unset: new ones"
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        fields = type(self).model_fields
        own = [name for name in fields if getattr(self, name) != fields[name].default and name not in EITHER]
        if not self.tunes and own:
            raise ValueError(f"{', '.join(own)}: of fine-tuning, but the task is pretrain; add --task sft")
        if self.task == "dpo":
            raise ValueError("task: dpo can be planned, but not trained yet; give sft or lora")
        beside = [name for name in own if name.startswith(("lora_", "rslora"))]
        if self.tunes and not self.adapts and beside:
            raise ValueError(f"{', '.join(beside)}: of LoRA's adapters, but the task is sft; give --task lora")
        if self.tunes and self.dataset_name_or_path is None:
            raise ValueError(f"dataset_name_or_path: missing; {self.task} learns from a folder with train.json")
        if self.zero_padding and self.packing not in (None, self._stock_packing):
            raise ValueError(f"packing: {self.packing} contradicts zero_padding; give one of them")
        return self

    @property
    def tunes(self) -> bool:
        """Whether a model is fine-tuned, on conversations."""
        return self.kind != "pretrain"

    @property
    def kind(self) -> Kind:
        """The task, whichever option says it."""
        return "lora" if self.lora else self.task

    @property
    def adapts(self) -> bool:
        """Whether adapters learn, and nothing else."""
        return self.kind == "lora"

    def adapters(self, base: str) -> Adapters | None:
        """Those that learn; `base`: what tells the weights beside them."""
        if not self.adapts:
            return None
        rank = self.lora_rank or RANK
        return Adapters(rank, self.lora_alpha or (4.0 if self.rslora else 2.0 * rank), self.rslora, base)

    @property
    def _stock_packing(self) -> Packing:
        if not self.zero_padding:
            return "none"
        return "greedy" if self.greedy_zero_padding else "in_order"

    @property
    def rows(self) -> Packing:
        """Which samples share a row."""
        return self.packing or self._stock_packing
