"""The tiny models of tests/fixtures, and what transformers computes with them (make_huggingface.py there)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent / "fixtures" / "huggingface"
NAMES = ("llama", "qwen2", "qwen2-tied", "llama3.2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral")
TOLERANCE = 1e-4  # of logits and losses against transformers'; seen were 4e-6 and 1e-6


@dataclass(frozen=True)
class Oracle:
    """What transformers computes."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]  # [steps, G, S + 1]
    logits: np.ndarray[Any, np.dtype[np.float32]]  # [G, S, V] of the first step
    losses: list[float]  # of each step
    recipe: dict[str, float]

    @property
    def seq_length(self) -> int:
        return self.tokens.shape[-1] - 1


def oracle_of(name: str) -> Oracle:
    arrays = load_file(FOLDER / name / "oracle.safetensors")
    told = json.loads((FOLDER / name / "oracle.json").read_text())
    return Oracle(arrays["tokens"], arrays["logits"], told["losses"], told["recipe"])
