"""What the runtime needs of PaddleNLP for a model family. The room adapters provides it; nothing else names any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..model import ModelShape
from ..plan import Assumptions
from . import device


@dataclass(frozen=True)
class Kernels:
    """Which of Paddle's kernels for GPUs are used in place of what plain ones compute together."""

    flash_attention: bool = False
    fused_rope: bool = False
    fused_rms_norm: bool = False
    fused_cross_entropy: bool = False  # where the vocabulary is split

    @classmethod
    def of(cls, assumed: Assumptions) -> Self:
        """Those that a plan assumes, where this device has them."""
        return cls(*(device.on_gpu() and bool(getattr(assumed, name)) for name in cls.__match_args__))


PLAIN = Kernels()


class Adapter(Protocol):
    """How PaddleNLP runs a family of decoder-only transformers. What their layers are made of says the shape."""

    def config(self, shape: ModelShape, seq_length: int, kernels: Kernels = PLAIN) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        """One decoder layer of PaddleNLP's, with the weights of `shape.block`."""

    def final_norm(self, config: Any) -> Any:
        """The norm in front of the LM head."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        """PaddleNLP's own causal language model: the oracle of the parity check."""
