"""What the runtime needs of PaddleNLP for a model family. The room adapters provides it; nothing else names any."""

from __future__ import annotations

from typing import Any, Protocol

from ..model import ModelShape


class Adapter(Protocol):
    """How PaddleNLP runs a family of decoder-only transformers. What their layers are made of says the shape."""

    def config(self, shape: ModelShape, seq_length: int, flash_attention: bool = False) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""

    def decoder_layer(self, shape: ModelShape, config: Any) -> Any:
        """One decoder layer of PaddleNLP's, with the weights of `shape.block`."""

    def final_norm(self, config: Any) -> Any:
        """The norm in front of the LM head."""

    def whole_model(self, shape: ModelShape, config: Any) -> Any:
        """PaddleNLP's own causal language model: the oracle of the parity check."""
