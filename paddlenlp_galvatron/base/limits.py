"""Limits of numbers from users and files: each limit once, as a type for options and fields.

All are far beyond any training run, and low enough to refuse a wrong number before it fills the memory.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

MOST_RANKS = 65_536  # the largest published runs had about 25,000 ranks
MOST_LAYERS = 10_000
MOST_SAMPLES = 1_000_000
MOST_SIZE = 2**24  # of hidden size, heads, words of a vocabulary, sequence length
MOST_TRAINED = 1_000_000  # tokens of a tokenizer; memory is set aside for them, and the largest published have 900,000

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]  # number of steps, workers or similar
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]  # 0: none
CountOrAll = Annotated[int, Field(ge=-1, le=1_000_000_000)]  # -1: all of them
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]  # number of ranks, nodes, devices, stages; a degree
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]  # index of a rank or node
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
LayersOrNone = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]  # global batch size, or micro-batches


def _thousands(value: object) -> object:
    """A number that may be written with k, as sequence lengths are: 8k is 8192."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,6})[kK]", value)):
        return 1024 * int(match[1])
    return value


Size = Annotated[int, BeforeValidator(_thousands), Field(ge=1, le=MOST_SIZE)]
Trained = Annotated[int, Field(ge=1, le=MOST_TRAINED)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # range that numpy and Paddle accept
Port = Annotated[int, Field(ge=1, le=65_535)]
Number = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]  # any unit: s, MiB, GB/s, epochs
Rate = Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]  # learning rate
RateOrNone = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]

MOST_NETWORK = 20_000  # GB/s of a node, ten times that of any so far
NETWORK = re.compile(r"((?P<links>[1-9]\d{0,2})x)?(?P<number>\d{1,6}(\.\d{1,6})?)(?P<unit>GB/s|Gb/s|Gbps|Gbit/s)?")


def gb_per_s(network: str, gpus_per_node: int) -> float:
    """GB/s a node of a network: `25` and `25GB/s` are of a node, `400Gb/s` of each GPU's link, `4x100Gb/s` of four
    links of a node. Raises ValueError."""
    match = NETWORK.fullmatch(network.replace(" ", ""))
    if match is None:
        raise ValueError("must be GB/s a node, such as 25, or Gb/s of links, such as 400Gb/s a GPU or 4x100Gb/s")
    links, number, bits = match["links"], float(match["number"]), (match["unit"] or "").startswith("Gb")
    per_node = number * int(links or (gpus_per_node if bits else 1)) / (8 if bits else 1)
    if not 0.01 <= per_node <= MOST_NETWORK:
        raise ValueError(f"{per_node:,g} GB/s a node is not between 0.01 and {MOST_NETWORK:,g}; is the unit right?")
    return per_node


def _links(value: object) -> object:
    if isinstance(value, str):
        gb_per_s(value, 1)
    return value


NodeLinks = Annotated[str, BeforeValidator(_links)]
