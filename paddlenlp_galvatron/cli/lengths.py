"""Lengths of the documents of a fine-tuning data set, for the commands that price a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.prices import LengthOptions


def with_lengths(
    values: Mapping[str, Any], seq_length: int, vocab_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The options, with `document_tokens` and `tokens` as the data set that they name has them; `say` receives how full
    its rows are.

    Raises UserError."""
    given = LengthOptions.from_values(values)
    if given.dataset_name_or_path is None:
        return dict(values)
    model, pairs = Path(str(values.get("model_size"))), values.get("task") == "dpo"
    if not model.is_dir():
        raise UserError("dataset_name_or_path: its lengths need a tokenizer; name the model by its folder")
    from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData

    packing = "in_order" if pairs and given.packing == "none" else given.packing
    try:
        layout = RowLayout(seq_length, vocab_size, packing=packing, pairs=pairs, keep=False)
        data = TuningData(given.dataset_name_or_path, model, layout, 1)
    except UserError as error:
        raise UserError(f"{fault}; or give --document_tokens" for fault in error.faults) from None
    lengths = data.lengths
    say(
        f"{given.dataset_name_or_path}: {data.samples} rows, filled to {lengths.filled:.1%}; {lengths.learnt:.1%} of "
        f"their tokens are learnt; a token's document has {lengths.document_tokens:,.0f} tokens"
    )
    own = {"document_tokens": lengths.document_tokens, "tokens": float(data.samples * seq_length)}
    return own | dict(values)
