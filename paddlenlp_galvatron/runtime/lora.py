"""LoRA's linear layers, and the factors that they begin with."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ..model.lora import FACTORS, Adapters, is_factor
from .paddle_private import take_over_hooks
from .weights import WHOLE, Array, SeededWeights, Slice, WeightSource


class LoRALinear(nn.Layer):  # type: ignore[misc]
    """x W + x A B times a scale, and the bias if there is one."""

    def __init__(self, plain: Any, adapters: Adapters):
        """`plain`: the linear layer in whose place it is. Parameters are made by whoever fills the layer."""
        super().__init__()
        inputs, outputs = plain.weight.shape
        self._scaling = adapters.scaling
        self.counts = True  # else it is the plain layer
        self.weight, self.bias = plain.weight, plain.bias
        self.lora_A = self.create_parameter([inputs, adapters.rank])
        self.lora_B = self.create_parameter([adapters.rank, outputs])
        take_over_hooks(self, plain)

    def product(self, x: Any) -> Any:
        """Without the bias."""
        if not self.counts:
            return paddle.matmul(x, self.weight)
        return paddle.matmul(x, self.weight) + paddle.matmul(paddle.matmul(x, self.lora_A) * self._scaling, self.lora_B)

    def forward(self, x: Any) -> Any:
        out = self.product(x)
        return out if self.bias is None else out + self.bias


def add_adapters(layer: Any, projections: list[str], adapters: Adapters) -> None:
    """Put adapters beside the projections of a decoder layer, named by their paths in it."""
    for path in projections:
        *owners, attribute = path.split(".")
        owner = layer
        for step in owners:
            owner = getattr(owner, step)
        setattr(owner, attribute, LoRALinear(getattr(owner, attribute), adapters))


class NewFactors:
    """A source of adapters as PaddleNLP and PEFT begin, A uniform within 1 / sqrt(inputs), B zero; so the model begins
    as its base. They depend on seed and name alone."""

    def __init__(self, seed: int):
        self._drawn = SeededWeights(seed, 1.0)

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> Array:
        if name.endswith(FACTORS[1]):
            return part.of(np.zeros(shape, np.float32))
        return self._drawn.uniform(name, shape, part, 1 / sqrt(shape[0]))


class Tuned:
    """A source of weights with adapters of another source beside them."""

    def __init__(self, base: WeightSource, adapters: WeightSource):
        self._base, self._adapters = base, adapters
        self.from_files = getattr(base, "from_files", False)

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> Array:
        return (self._adapters if is_factor(name) else self._base)(name, shape, part)
