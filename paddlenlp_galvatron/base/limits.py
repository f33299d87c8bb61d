"""Limits of numbers from users and files: each limit once, as a type for options and fields.

All are far beyond any training run, and low enough to refuse a wrong number before it fills the memory.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

MOST_RANKS = 65_536  # the largest published runs had about 25,000
MOST_LAYERS = 10_000
MOST_SAMPLES = 1_000_000
MOST_SIZE = 2**24  # of hidden size, heads, words of a vocabulary, sequence length
MOST_TRAINED = 1_000_000  # tokens of a tokenizer; memory is set aside for them, and the largest published have 900,000

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]  # of steps and the like
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]  # 0: none
CountOrAll = Annotated[int, Field(ge=-1, le=1_000_000_000)]  # -1: all of them
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]  # or nodes, devices, degrees, stages
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]  # or a node, counted from 0
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]  # of a step; or micro-batches


def _thousands(value: object) -> object:
    """8k, as sequence lengths are written, is 8192."""
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]{1,6})[kK]", value)):
        return 1024 * int(found[1])
    return value


Size = Annotated[int, BeforeValidator(_thousands), Field(ge=1, le=MOST_SIZE)]
Trained = Annotated[int, Field(ge=1, le=MOST_TRAINED)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # as numpy and Paddle take it
Port = Annotated[int, Field(ge=1, le=65_535)]
Number = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]  # of any unit: s, MiB, GB/s, epochs
Rate = Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]  # of learning
RateOrNone = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]
