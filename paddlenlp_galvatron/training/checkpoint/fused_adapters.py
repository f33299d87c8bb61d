"""PEFT's adapters of experts where transformers keeps those of a layer in one parameter (`target_parameters`).

The lora_A of E experts is [E * rank, in], and lora_B [out, rank * E], its columns by rank, then by expert. Those of
down_proj are named `experts`, and those of gate_up_proj `experts.base_layer`: outputs of gate, then of up, with one
lora_A for both. Where PEFT made them from adapters of single experts, the first half of the ranks is gate's, the second
half is up's, and lora_B is 0 in two quarters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...model.lora import FACTORS, Adapters
from ...runtime.weights import Array

PATTERNS: dict[str, tuple[type, ...]] = {"rank_pattern": (int,), "alpha_pattern": (int, float)}


@dataclass(frozen=True)
class StoredFactor:
    """A factor under its names."""

    name: str  # PaddleNLP's
    shape: tuple[int, ...]
    peft: str
    expert: int | None = None  # of which expert of its layer
    product: int = 0  # of the expert: gate, up or down

    @property
    def projection(self) -> str:
        return self.name.split(".")[-2]

    @property
    def is_first(self) -> bool:
        return self.name.endswith(FACTORS[0])

    @property
    def fused(self) -> str:
        """PEFT's name of those of all experts of the layer; that of the factor alone where it is of none."""
        if self.expert is None:
            return self.peft
        layer, factor = self.peft.split(".")[:5], self.peft.split(".")[-2:]
        return ".".join([*layer, "mlp.experts", *(["base_layer"] if self.product < 2 else []), *factor])


class FusedExperts:
    """Factors of single experts from those of all experts of a layer."""

    def __init__(self, read: Callable[[str], Array], experts: int, adapters: Adapters, config: dict[str, Any]):
        """`config`: PEFT's, from which entries of gate_up_proj in its patterns are taken out. `read` gives a tensor."""
        own: dict[str, Any] = {}
        for name, kinds in PATTERNS.items():
            pattern: dict[str, Any] = config[name] if isinstance(config.get(name), dict) else {}
            for key in [key for key in pattern if key.endswith("gate_up_proj")]:
                if isinstance(pattern[key], kinds) and pattern[key] > 0:
                    own[name] = pattern.pop(key)
        self._read, self._experts, self._rank = lru_cache(maxsize=4)(read), experts, adapters.rank
        both = Adapters(
            own.get("rank_pattern", adapters.rank), own.get("alpha_pattern", adapters.alpha), adapters.rslora
        )
        self._stored_rank, self._scale = both.rank, both.scaling / adapters.scaling
        self._halves = False

    def size(self, factor: StoredFactor) -> tuple[int, ...]:
        """Shape of the tensor that holds a factor."""
        inputs, outputs = factor.shape
        if factor.expert is None:
            return outputs, inputs
        columns = self._experts * (self._rank if factor.product == 2 else self._stored_rank)
        return (columns, inputs) if factor.is_first else (outputs * (1 if factor.product == 2 else 2), columns)

    def rank(self, factors: Iterable[StoredFactor]) -> int:
        """Rank of the adapters of gate and up of a single expert."""
        of_gate = [factor for factor in factors if factor.expert == 0 == factor.product and not factor.is_first]
        self._halves = self._stored_rank == 2 * self._rank and all(self._in_halves(each.fused) for each in of_gate)
        return self._rank if self._halves else self._stored_rank

    def _in_halves(self, name: str) -> bool:
        gate, up = np.split(self._read(name), 2)
        middle = gate.shape[1] // 2
        return not (gate[:, middle:].any() or up[:, :middle].any())

    def __call__(self, factor: StoredFactor) -> Array:
        """A factor of an expert as PaddleNLP has it."""
        tensor, both = self._read(factor.fused), factor.product < 2
        if factor.is_first:
            part = tensor.reshape(self._experts, -1, tensor.shape[1])[factor.expert].T
        else:
            part = tensor.reshape(tensor.shape[0], -1, self._experts)[:, :, factor.expert].T
            if both:
                part = np.split(part, 2, axis=1)[factor.product] * np.float32(self._scale)
        if both and self._halves:
            part = np.split(part, 2, axis=1 if factor.is_first else 0)[factor.product]
        return part
