"""What the runtime needs to know of a model family. Adapters in models/ provide it; nothing else names a model."""

from __future__ import annotations

from typing import Any, Protocol

from ..plan import ModelShape


class Family(Protocol):
    """A family of decoder-only transformers in PaddleNLP.

    The names of sub-layers are paths inside the decoder layer. A block is cut at its seams: tokens enter attention
    and MLP behind a norm, pass through column-split projections, and leave through a row-split one.
    """

    name: str
    prefix: str  # of the decoder's weights in a PaddleNLP checkpoint, such as "llama"
    attention: str
    attention_norm: str
    attention_columns: tuple[str, ...]  # q, k, v
    attention_kv: tuple[str, ...]  # of these, k and v
    attention_row: str
    mlp_norm: str
    mlp_columns: tuple[str, ...]
    mlp_row: str

    def config(self, shape: ModelShape, seq_length: int, flash_attention: bool = False) -> Any:
        """PaddleNLP's config of the whole model, unsplit."""

    def decoder_layer(self, config: Any) -> Any:
        """One decoder layer of PaddleNLP's."""

    def final_norm(self, config: Any) -> Any:
        """The norm in front of the LM head."""

    def whole_model(self, config: Any) -> Any:
        """PaddleNLP's own causal language model: the oracle of the parity check."""
