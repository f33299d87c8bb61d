"""The tiny models of tests/fixtures, and what transformers computes with them (make_huggingface.py there), and PEFT and
TRL (make_tuning.py)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddlenlp_galvatron.runtime.batch import IGNORED_LABEL, Samples

FOLDER = Path(__file__).parents[1] / "fixtures" / "huggingface"
TUNING = FOLDER.parent / "tuning"
NAMES = ("llama", "qwen2", "qwen2-tied", "llama3.2", "qwen3", "qwen3_moe", "qwen2_moe", "qwen2_moe-dense", "mixtral")
NAMES += ("deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "ernie4_5", "glm4_moe", "glm4_moe-air")
NAMES += ("ernie4_5_moe", "ernie4_5_moe-interval", "ernie4_5-bias", "ernie4_5_moe-bias")
TOLERANCE = 1e-4  # of logits and losses against transformers'; seen were 4e-6 and 1e-6


@dataclass(frozen=True)
class Oracle:
    """Results of transformers."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]  # [steps, G, S + 1]
    logits: np.ndarray[Any, np.dtype[np.float32]]  # [G, S, V] of the first step
    losses: list[float]  # of each step
    recipe: dict[str, float]

    @property
    def seq_length(self) -> int:
        return self.tokens.shape[-1] - 1


def oracle_of(name: str) -> Oracle:
    arrays = load_file(FOLDER / name / "oracle.safetensors")
    reported = json.loads((FOLDER / name / "oracle.json").read_text())
    return Oracle(arrays["tokens"], arrays["logits"], reported["losses"], reported["recipe"])


@dataclass(frozen=True)
class TuningOracle:
    """Results of PEFT and TRL."""

    losses: dict[str, list[float]]  # of each step, by the loss of pairs; "": of tokens, on the other oracle's
    metrics: dict[str, float]  # of pairs, in the first step
    beta: float
    recipe: dict[str, float]
    pairs: list[list[list[int]]]  # prompt, chosen and rejected answer of each

    def rows(self, seq_length: int) -> Samples:
        """A pair in each row; log-probabilities by the reference are yet to come."""
        shape = len(self.pairs), seq_length
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL)
        ends, facts = np.full(shape, seq_length), np.zeros((len(self.pairs), 1, 4), np.float32)
        for row, (prompt, *answers) in enumerate(self.pairs):
            start = 0
            for side, answer in enumerate(answers):
                tokens = [*prompt, *answer]
                stop = start + len(tokens) - 1
                ids[row, start:stop], ends[row, start:stop] = tokens[:-1], stop
                labels[row, stop - len(answer) : stop] = answer
                facts[row, 0, 2 + side], start = len(answer), stop
        return Samples(ids, labels, ends, facts)


def tuning_of(name: str) -> TuningOracle:
    reported = json.loads((TUNING / name / "oracle.json").read_text())
    losses = {"": reported["losses"], **reported["by_loss"]}
    return TuningOracle(losses, reported["metrics"], reported["beta"], reported["recipe"], reported["pairs"])
