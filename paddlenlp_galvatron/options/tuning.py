"""Fine-tuning by PaddleNLP's names: the conversations, their rows of tokens, and the loss of pairs (DPO)."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..base.limits import Number, Positive, Size
from ..model import Adapters, Preference
from .group import Options
from .prices import RANK, Kind, Packing

KTO = "kto_pair"
PAIRS = ("train_dataset_path", "dev_dataset_path", "max_prompt_len")
Alpha = Annotated[Positive | None, BeforeValidator(lambda value: None if str(value) == "-1" else value)]
EITHER = {"task", "tokenizer_name_or_path"}  # also options of pretraining, whose data has tokens


class TuningOptions(Options):
    """The task, its samples and its adapters."""

    panel = "Fine-tuning"
    task: Kind = "pretrain"
    dataset_name_or_path: Path | None = None
    train_dataset_path: Path | None = None
    dev_dataset_path: Path | None = None
    tokenizer_name_or_path: Path | None = None
    src_length: Size = 1024
    max_prompt_len: Size = 2048
    chat_template: str | None = None
    autoregressive: bool = False
    packing: Packing | None = None
    zero_padding: bool = False
    greedy_zero_padding: bool = False
    lora: bool = False
    lora_rank: Size | None = None
    lora_alpha: Alpha | None = None
    rslora: bool = False
    rslora_plus: bool = False
    lora_plus_scale: Positive = 1.0
    lora_path: Path | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        fields = TuningOptions.model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default and name not in EITHER]
        of_lora = [name for name in changed if name.startswith(("lora_", "rslora"))]
        if not self.tunes and changed:
            of_pairs = self.model_fields_set & {*PAIRS, *PreferenceOptions.model_fields}
            task = "dpo" if of_pairs else "lora" if of_lora else "sft"
            raise ValueError(f"{', '.join(changed)}: of fine-tuning, but the task is pretrain; add --task {task}")
        if self.tunes and not self.adapts and of_lora:
            raise ValueError(f"{', '.join(of_lora)}: of LoRA's adapters, but the task is {self.task}; give --lora 1")
        pairs = [name for name in changed if name in PAIRS]
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
        """Whether only adapters are trained."""
        return self.lora or self.task == "lora"

    def adapters(self, base: str) -> Adapters | None:
        """The trained adapters; `base`: identity of their base weights."""
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

    loss_type: Literal["sigmoid", "hinge", "ipo", "dpop", "sppo_hard", "nca_pair", "simpo", "or", "orpo"] = "sigmoid"
    beta: Positive = 0.1
    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    pref_loss_ratio: Number = 1.0
    sft_loss_ratio: Number = 0.0
    simpo_gamma: Number = 0.5
    dpop_lambda: Number = 50.0
    reference_free: bool = False

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
