"""Rows of the options that say which model: the same for profiles, search and training, seen in the shapes there."""

from __future__ import annotations

import json
from pathlib import Path

from .row import Row

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 320,
    "max_position_embeddings": 32,
}


def write_model(folder: Path) -> None:
    (folder / "model.json").write_text(json.dumps(CONFIG))


def rows(shapes: str, length: str, **base: object) -> dict[str, Row]:
    """`shapes`, `length`: where a command shows its layer types by number, and the sequence length. `base`: options
    that make it take model.json; of its 8 tokens `seq_length` must be one."""

    def row(value: object, shows: str, **beside: object) -> Row:
        return Row(value, shows, base | beside)

    first = f"{shapes}.0"
    return {
        "model_size": row("model.json", "refusal"),
        "set_model_config_manually": row("0", f"{first}.intermediate_size", intermediate_size=128),
        "set_layernum_manually": row("0", f"{first}.layers", num_layers=4),
        "set_seqlen_manually": row("0", length),
        "model_type": row("qwen2", f"{first}.family"),
        "hidden_size": row(32, f"{first}.hidden_size"),
        "num_layers": row(4, f"{first}.layers"),
        "num_attention_heads": row(4, f"{first}.heads"),
        "num_key_value_heads": row(2, f"{first}.kv_heads"),
        "intermediate_size": row(128, f"{first}.intermediate_size"),
        "vocab_size": row(256, f"{first}.vocab_size"),
        "max_position_embeddings": row(48, f"{first}.max_position_embeddings"),
        "tie_word_embeddings": row(1, f"{first}.tied_embeddings"),
        "make_vocab_size_divisible_by": row(7, "refusal"),
        "seq_length": row(16, length),
        "num_layertype": row(2, "refusal"),
        "hidden_size_list": row("64,128", f"{shapes}.1.hidden_size", layernum_list="1,1"),
        "layernum_list": row(3, f"{first}.layers"),
        "seqlen_list": row("16", length, seq_length=None, set_seqlen_manually=0),
    }
