"""What the runtime needs of PaddleNLP for a model family. Adapters in models/ provide it; nothing else names any."""

from __future__ import annotations

from typing import Any, Protocol

from ..model import ModelShape


class Family(Protocol):
    """A family of decoder-only transformers in PaddleNLP. What its layers are made of is in the model's description."""

    def config(self, shape: ModelShape, seq_length: int, flash_attention: bool = False) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        """One decoder layer of PaddleNLP's, with the weights of `shape.block`."""

    def final_norm(self, config: Any) -> Any:
        """The norm in front of the LM head."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        """PaddleNLP's own causal language model: the oracle of the parity check."""
