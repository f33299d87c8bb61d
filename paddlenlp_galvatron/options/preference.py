"""DPO by PaddleNLP's names: which loss of pairs of answers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ..base.limits import Number, Positive
from ..model.preference import Preference
from .group import Options

KTO = "kto_pair"


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
    pref_loss_ratio: Number = Field(1.0, description="what the loss of pairs is multiplied by")
    sft_loss_ratio: Number = Field(0.0, description="what the loss of a chosen answer's token is added with")
    simpo_gamma: Number = Field(0.5, description="margin of simpo")
    dpop_lambda: Number = Field(50.0, description="what a chosen answer that becomes less likely costs: dpop")
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
