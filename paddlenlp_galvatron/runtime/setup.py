"""The setup of a model for training, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..model import Adapters, Preference
from ..plan import ModelShape, Plan
from ..plan.precision import NumberTypes, Precision
from .adapters import load_family
from .adapters.decoder import Adapter
from .kernels import Kernels
from .precision import on_device
from .weights import SeededWeights, WeightSource

MTP_WEIGHT = 0.3  # lambda of DeepSeek-V3 for its first 10T tokens, arXiv:2412.19437, section 4.2; Megatron-LM's is 0.1


@dataclass(frozen=True)
class ModelSetup:
    """A model under a plan, and how its layers compute on this device."""

    plan: Plan
    shape: ModelShape
    seq_length: int
    source: WeightSource
    numbers: NumberTypes
    kernels: Kernels
    seed: int = 0  # seed of dropout
    packed: bool = False  # rows may hold several documents, whose ends every layer needs
    adapters: Adapters | None = None  # LoRA adapters; all other weights are frozen
    preference: Preference | None = None  # rows hold pairs of answers, and the loss is of these
    mtp_weight: float = MTP_WEIGHT  # weight of MTP's loss

    @classmethod
    def of(
        cls, plan: Plan, shape: ModelShape, seq_length: int, compute_precision: Precision | None = None, **further: Any
    ) -> ModelSetup:
        """The setup with the plan's types and kernels that this device has. Weights without a `source` are
        drawn from `seed`. `compute_precision`: the type that layers compute in, if not the plan's (on CPU: fp32).
        `further`: further fields. Raises UserError for a precision that this device lacks."""
        assumed, seed = plan.assumed, further.get("seed", 0)
        fields: dict[str, Any] = {
            "source": SeededWeights(seed, shape.initializer_range),
            "numbers": on_device(assumed.number_types, compute_precision),
            "kernels": Kernels.of(assumed),
        }
        return cls(
            plan, shape, seq_length, **fields | {name: each for name, each in further.items() if each is not None}
        )

    @cached_property
    def family(self) -> Adapter:
        return load_family(self.shape.trained().family)

    @cached_property
    def config(self) -> Any:
        """PaddleNLP's config of the model."""
        return self.family.config(self.shape, self.seq_length, self.kernels)
