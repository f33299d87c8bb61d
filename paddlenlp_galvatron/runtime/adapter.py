"""The interface between the runtime and PaddleNLP's layers of a model family, which `adapters/` implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..model import ModelShape
from ..plan import Assumptions, Plan, UserError
from . import device

ROWS_OF_OWN_QUERIES = (3, 2)  # the first Paddle whose flashmask takes as many rows as there are queries


@dataclass(frozen=True)
class Kernels:
    """Paddle's fused GPU kernels that replace plain operations."""

    flash_attention: bool = False
    fused_rope: bool = False
    fused_rms_norm: bool = False
    fused_cross_entropy: bool = False  # where the vocabulary is split

    @classmethod
    def of(cls, assumed: Assumptions) -> Self:
        """Kernels that a plan assumes and this device has."""
        return cls(*(device.on_gpu() and bool(getattr(assumed, name)) for name in cls.__match_args__))

    def require_version(self, plan: Plan, version: str) -> None:
        """Raise UserError where a kernel of this version of Paddle refuses what the plan asks of it."""
        parallel = any(layer.context > 1 for layer in plan.layers)
        if self.flash_attention and parallel and tuple(map(int, version.split(".")[:2])) < ROWS_OF_OWN_QUERIES:
            raise UserError(
                f"cp_sizes_enc: flash attention of Paddle {version} refuses fewer queries than keys; install Paddle "
                f"{'.'.join(map(str, ROWS_OF_OWN_QUERIES))} or newer, or search a plan with --max_cp_deg 1"
            )


PLAIN = Kernels()


class Adapter(Protocol):
    """How PaddleNLP runs a family of decoder-only transformers. The shape describes their layers."""

    def config(self, shape: ModelShape, seq_length: int, kernels: Kernels = PLAIN) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        """One decoder layer of PaddleNLP's, with the weights of `shape.block`."""

    def final_norm(self, config: Any) -> Any:
        """The norm in front of the LM head."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        """PaddleNLP's own causal language model: the oracle of the parity check."""
