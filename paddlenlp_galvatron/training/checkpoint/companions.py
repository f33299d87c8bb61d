"""The files next to a model's weights: how it is sampled, its tokenizer and its templates."""

from __future__ import annotations

import shutil
from pathlib import Path

PATTERNS = (  # of transformers' and PaddleNLP's files, those of tokenizers that bring their own code included
    *("generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tokenization_*.py"),
    *("vocab.*", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "tekken.json"),
    *("chat_template.*", "additional_chat_templates/*.jinja"),
)


def companions(folder: Path) -> dict[str, Path]:
    """The files of a model's directory that belong to its weights, besides config.json, by their names in it."""
    found = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
    return {str(path.relative_to(folder)): path for path in found}


def copy_companions(source: Path, target: Path) -> None:
    """Copy them, unchanged. Raises OSError."""
    for name, file in companions(source).items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target / name)
