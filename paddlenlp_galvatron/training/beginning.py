"""The weights that a run begins with, and which of them learn at which rate."""

from __future__ import annotations

from typing import NamedTuple

from ..model.lora import FACTORS, Adapters
from ..plan import ModelShape
from ..runtime.engine import Engine
from ..runtime.lora import NewFactors, Tuned
from ..runtime.weights import SeededWeights, WeightSource
from .checkpoint.adapters import base_identity, open_adapters
from .checkpoint.pretrained import weights_from
from .settings import TrainSettings


class Beginning(NamedTuple):
    """The weights at the first step."""

    source: WeightSource | None  # None: drawn from the seed
    adapters: Adapters | None  # they alone learn; None: all weights do
    base: str  # identity of the weights beside adapters, or of DPO's reference; "": neither needs one


def beginning(settings: TrainSettings, shape: ModelShape) -> Beginning:
    """Raises UserError."""
    folder, tuning = settings.initial_weights, settings.tuning
    weights = weights_from(folder, shape) if folder else None
    base = base_identity(folder, settings.seed) if tuning.adapts or settings.compares else ""
    adapters = tuning.adapters(base)
    if adapters is None:
        return Beginning(weights, None, base)
    frozen = weights or SeededWeights(settings.seed, shape.initializer_range)
    path = tuning.lora_path
    factors = NewFactors(settings.seed) if path is None else open_adapters(path, shape, adapters)
    return Beginning(Tuned(frozen, factors), adapters, base)


def set_rates(engine: Engine, scale: float) -> None:
    """LoRA+: let the second factors learn so many times as fast."""
    for trainable in engine.trainables:
        if trainable.pieces[0].weight.name.endswith(FACTORS[1]):
            trainable.tensor.optimize_attr["learning_rate"] = scale
