"""LoRA: linear layers with factors, the initial factors, and frozen weights.

Frozen weights have no gradients, fp32 masters, optimizer states and reductions. Under ddp and zero2 they are whole;
under zero3 sharded and gathered for each pass.
"""

from collections.abc import Sequence
from functools import reduce
from math import sqrt
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ..model.lora import FACTORS, Adapters, is_factor
from ..plan import DataParallel
from ..plan.comm_points import WEIGHT_OPS
from .chain import UnitMaker
from .paddle_private import take_over_hooks
from .units import ShardedUnit, Trainable, Unit
from .weights import WHOLE, Array, SeededWeights, ShardedParameter, Slice, WeightSource


class LoRALinear(nn.Layer):  # type: ignore[misc]
    """x W + x A B times a scale, and the bias if there is one."""

    def __init__(self, plain: Any, adapters: Adapters):
        """`plain`: the linear layer that it replaces. The caller makes the parameters."""
        super().__init__()
        inputs, outputs = plain.weight.shape
        self._scaling = adapters.scaling
        self.counts = True  # False: adapters are disabled
        self.weight, self.bias = plain.weight, plain.bias
        self.lora_A = self.create_parameter([inputs, adapters.rank])
        self.lora_B = self.create_parameter([adapters.rank, outputs])
        take_over_hooks(self, plain)

    def product(self, x: Any) -> Any:
        """Output [..., out] without the bias."""
        return self.sum(*(paddle.matmul(x, matrix) for matrix in read_by(self)))

    def sum(self, product: Any, narrow: Any = None) -> Any:
        """Output without the bias, from the products of its input with the weight and with A."""
        return product if narrow is None else product + paddle.matmul(narrow * self._scaling, self.lora_B)

    def forward(self, x: Any) -> Any:
        out = self.product(x)
        return out if self.bias is None else out + self.bias


def read_by(layer: Any) -> list[Any]:
    """The matrices by which a linear layer multiplies its input."""
    return [layer.weight, layer.lora_A] if getattr(layer, "counts", False) else [layer.weight]


def after_products(layer: Any, *products: Any) -> Any:
    """A linear layer's output from these products."""
    out = layer.sum(*products) if isinstance(layer, LoRALinear) else products[0]
    return out if layer.bias is None else out + layer.bias


def add_adapters(layer: Any, projections: list[str], adapters: Adapters) -> None:
    """Add adapters to the projections of a decoder layer, named by their paths in it."""
    for path in projections:
        *owners, attribute = path.split(".")
        owner = reduce(getattr, owners, layer)
        setattr(owner, attribute, LoRALinear(getattr(owner, attribute), adapters))


class NewFactors:
    """A source of initial adapters as in PaddleNLP and PEFT: A uniform within 1 / sqrt(inputs), B zero, so the model
    starts as its base. They depend only on seed and name."""

    def __init__(self, seed: int):
        self._drawn = SeededWeights(seed, 1.0)

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        if name.endswith(FACTORS[1]):
            return rank_slice.of(np.zeros(shape, np.float32))
        return self._drawn.uniform(name, shape, rank_slice, 1 / sqrt(shape[0]))


class Tuned:
    """A source of weights and of adapters from another source."""

    def __init__(self, base: WeightSource, adapters: WeightSource):
        self._base, self._adapters = base, adapters

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        return (self._adapters if is_factor(name) else self._base)(name, shape, rank_slice)


class _Frozen(Unit):
    sends_whole = False

    def make_trainables(self) -> list[Trainable]:
        return []

    def backward_done(self, last: bool) -> None:
        pass

    def finish(self) -> None:
        pass

    def finish_reductions(self) -> None:
        pass


class FrozenShards(_Frozen, ShardedUnit):
    """Sharded over the group."""


class FrozenUnits(UnitMaker):
    """Makes the units of modules with only adapters trained. Adapters of routed experts are units, with first and
    second factors separate because their learning rates differ; the others are few, small and whole, like vectors."""

    def adopt(
        self, parameters: Sequence[ShardedParameter], dp_type: DataParallel, of_experts: DataParallel | None = None
    ) -> None:
        for weight in parameters:
            weight.tensor.stop_gradient = not is_factor(weight.name)
        super().adopt(parameters, dp_type, of_experts)
        self.frozen += [weight for weight in self.vectors if not is_factor(weight.name)]
        self.vectors = [weight for weight in self.vectors if is_factor(weight.name)]

    def _unit_of(self, weight: ShardedParameter) -> Any:
        if not is_factor(weight.name):
            return super()._unit_of(weight)
        return (True, weight.name.rpartition(".")[2]) if weight.expert else None

    def _make(self, weights: Sequence[ShardedParameter], dp_type: DataParallel) -> Unit:
        if is_factor(weights[0].name):
            return super()._make(weights, dp_type)
        group = weights[0].sum_group
        if group is None or WEIGHT_OPS[dp_type].gather is None:
            return _Frozen(weights, group)
        return FrozenShards(weights, weights[0].shard_group or group, every_micro_batch=False, keep_whole=False)
