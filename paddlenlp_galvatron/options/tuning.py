"""Fine-tuning by PaddleNLP's names: the conversations, their rows of tokens, and the loss of pairs (DPO)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..base.limits import Number, Positive, Size
from ..model.lora import Adapters
from ..model.preference import Preference
from .group import Options
from .prices import RANK, Kind, Packing

KTO = "kto_pair"
PAIRS = ("train_dataset_path", "dev_dataset_path", "max_prompt_len")
Alpha = Annotated[Positive | None, BeforeValidator(lambda value: None if str(value) == "-1" else value)]
EITHER = {"task", "tokenizer_name_or_path"}  # pretraining's, too, whose data bring their tokens


class TuningOptions(Options):
    """The task, its samples and its adapters."""

    panel = "Fine-tuning"
    task: Kind = Field(
        "pretrain",
        description="pretrain; sft: fine-tune all weights on dataset_name_or_path, from the model's own; lora: "
        "adapters, all else frozen; dpo: prefer one answer to another, with --lora 1 by adapters",
    )
    dataset_name_or_path: Path | None = Field(
        None, description="folder with train.json and dev.json, or train/*.json and dev/*.json: a JSON object a line"
    )
    train_dataset_path: Path | None = Field(None, description="DPO: file of pairs, in place of dataset_name_or_path")
    dev_dataset_path: Path | None = Field(None, description="DPO: file of pairs that are evaluated")
    tokenizer_name_or_path: Path | None = Field(
        None, description="folder of the tokenizer, or its tokenizer.json; unset: the model's"
    )
    src_length: Size = Field(1024, description="most tokens of the prompt; the rest is cut")
    max_prompt_len: Size = Field(
        2048, description="DPO: most tokens of a prompt whose pair does not fit; at most a quarter of a row"
    )
    chat_template: str | None = Field(
        None,
        description="chat_template.json, a Jinja file or a folder with one; plain: none; unset: the tokenizer's own",
    )
    autoregressive: bool = Field(False, description="1: learn all tokens, also of the prompt")
    packing: Packing | None = Field(
        None,
        description="which samples share a row: none, in_order, greedy (both PaddleNLP's) or best_fit (least padding); "
        "attention stays within a sample; unset: as zero_padding says, in_order in DPO",
    )
    zero_padding: bool = Field(False, description="1: the same as packing in_order")
    greedy_zero_padding: bool = Field(False, description="1: with zero_padding the same as packing greedy")
    lora: bool = Field(False, description="1: the same as task lora; of task dpo: adapters learn")
    lora_rank: Size | None = Field(None, description=f"rank of LoRA's adapters; unset: {RANK}")
    lora_alpha: Alpha | None = Field(
        None, description="LoRA's alpha: adapters count alpha / rank; unset or -1: twice the rank, or 4 with rslora"
    )
    rslora: bool = Field(False, description="1: adapters count alpha / sqrt(rank)")
    rslora_plus: bool = Field(False, description="1: rslora with lora_plus_scale 4 and lora_alpha 4")
    lora_plus_scale: Positive = Field(1.0, description="learning rate of LoRA's B over that of A")
    lora_path: Path | None = Field(
        None, description="adapters to begin with: PEFT's or PaddleNLP's folder, or a checkpoint; unset: new ones"
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        fields = TuningOptions.model_fields
        own = [name for name in fields if getattr(self, name) != fields[name].default and name not in EITHER]
        of_lora = [name for name in own if name.startswith(("lora_", "rslora"))]
        if not self.tunes and own:
            of_pairs = self.model_fields_set & {*PAIRS, *PreferenceOptions.model_fields}
            task = "dpo" if of_pairs else "lora" if of_lora else "sft"
            raise ValueError(f"{', '.join(own)}: of fine-tuning, but the task is pretrain; add --task {task}")
        if self.tunes and not self.adapts and of_lora:
            raise ValueError(f"{', '.join(of_lora)}: of LoRA's adapters, but the task is {self.task}; give --lora 1")
        pairs = [name for name in own if name in PAIRS]
        if self.tunes and self.kind != "dpo" and pairs:
            raise ValueError(f"{', '.join(pairs)}: of DPO, but the task is {self.kind}; give --task dpo")
        if self.tunes and self.dataset_name_or_path is None and self.train_dataset_path is None:
            raise ValueError(f"dataset_name_or_path: missing; {self.task} learns from a folder with train.json")
        if None not in (self.dataset_name_or_path, self.train_dataset_path):
            raise ValueError("train_dataset_path: dataset_name_or_path is given, too, and has both files; give one")
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
        return "lora" if self.lora and self.task != "dpo" else self.task

    @property
    def adapts(self) -> bool:
        """Whether adapters learn, and nothing else."""
        return self.lora or self.task == "lora"

    def adapters(self, base: str) -> Adapters | None:
        """The adapters that learn; `base`: identity of their base weights."""
        if not self.adapts:
            return None
        rank = self.lora_rank or RANK
        rslora = self.rslora or self.rslora_plus
        alpha = 4.0 if self.rslora_plus else self.lora_alpha or (4.0 if rslora else 2.0 * rank)
        return Adapters(rank, alpha, rslora, base)

    @property
    def lora_rate_scale(self) -> float:
        """Factor of B's learning rate over A's."""
        return 4.0 if self.rslora_plus else self.lora_plus_scale

    @property
    def _stock_packing(self) -> Packing:
        if not (self.zero_padding or self.kind == "dpo"):
            return "none"
        return "greedy" if self.greedy_zero_padding else "in_order"

    @property
    def effective_packing(self) -> Packing:
        """How samples share a row."""
        return self.packing or self._stock_packing


class PreferenceOptions(Options):
    """The loss of a chosen and a rejected answer."""

    panel = "DPO"

    loss_type: Literal["sigmoid", "hinge", "ipo", "dpop", "sppo_hard", "nca_pair", "simpo", "or", "orpo"] = Field(
        "sigmoid",
        description="sigmoid, hinge, ipo, dpop, sppo_hard or nca_pair; without a reference: simpo, or, orpo (or with "
        "sft_loss_ratio 1)",
    )
    beta: Positive = Field(0.1, description="how much the policy's distance from the reference counts")
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description="share of pairs that are taken to be wrong: sigmoid")
    pref_loss_ratio: Number = Field(1.0, description="factor of the loss of pairs")
    sft_loss_ratio: Number = Field(0.0, description="factor of the added loss of a chosen answer's token")
    simpo_gamma: Number = Field(0.5, description="margin of simpo")
    dpop_lambda: Number = Field(50.0, description="penalty on a chosen answer that becomes less likely: dpop")
    reference_free: bool = Field(False, description="1: no reference, as if all answers were as likely for it")

    @field_validator("loss_type", mode="before")
    @classmethod
    def _refuse_kto(cls, value: object) -> object:
        if value == KTO:
            raise ValueError(f"{KTO} is not supported: its mean over a micro-batch would differ from plan to plan")
        return value

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.pref_loss_ratio == 0 and self.pair_loss.sft_ratio == 0:
            raise ValueError("pref_loss_ratio: is 0, and sft_loss_ratio, too: nothing would be learnt; raise one")
        return self

    @property
    def pair_loss(self) -> Preference:
        odds = self.loss_type == "orpo"
        return Preference(
            loss="or" if odds else self.loss_type,  # type: ignore[arg-type]
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            ratio=self.pref_loss_ratio,
            sft_ratio=1.0 if odds else self.sft_loss_ratio,
            simpo_gamma=self.simpo_gamma,
            dpop_lambda=self.dpop_lambda,
            reference_free=self.reference_free,
        )
