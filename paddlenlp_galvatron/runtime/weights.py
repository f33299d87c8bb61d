"""Where weights come from, and which slice of each a rank keeps: the same model for every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import paddle
from paddle.autograd import PyLayer

from .collectives import broadcast
from .paddle_private import open_window, place_parameter, window
from .precision import Numbers, add, cast, has_dtype

Array = np.ndarray[Any, np.dtype[np.float32]]

BLOCK_ROWS = 256  # of a matrix drawn at once: 16 MiB at 16,384 columns


@dataclass(frozen=True)
class Slice:
    """Part `index` of `parts` equal ones along `axis`; axis None: the whole. `padded` is the axis's length with
    padding, where the whole does not split evenly."""

    axis: int | None = None
    index: int = 0
    parts: int = 1
    padded: int | None = None

    def interval(self, axis: int, length: int) -> tuple[int, int]:
        """First and last-plus-one index of an axis that the part holds; what is beyond its length is padding."""
        if axis != self.axis:
            return 0, length
        size = (self.padded or length) // self.parts
        return self.index * size, (self.index + 1) * size

    def of(self, whole: Array) -> Array:
        """This part of a whole array, padded with zeros."""
        if self.axis is None:
            return whole
        start, stop = self.interval(self.axis, whole.shape[self.axis])
        return self.pad(whole[(slice(None),) * self.axis + (slice(start, stop),)], stop - start)

    def pad(self, part: Array, size: int) -> Array:
        """Fill the part up to its size along the axis."""
        assert self.axis is not None
        padding = [(0, 0)] * part.ndim
        padding[self.axis] = (0, size - part.shape[self.axis])
        return np.ascontiguousarray(np.pad(part, padding) if padding[self.axis][1] else part)


WHOLE = Slice()


class WeightSource(Protocol):
    """Gives a part of a weight by PaddleNLP's name and shape of the whole.

    Where it has an attribute `from_files` that is true, one of the ranks that hold the same part asks for it.
    """

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> Array: ...


@dataclass(frozen=True)
class SeededWeights:
    """Random weights that depend on the seed and the weight's name alone: norms are 1, biases 0, the rest normal.

    Matrices are drawn in blocks of rows, so that a part takes little more memory than its own.
    """

    seed: int
    deviation: float  # standard deviation of the normal weights

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> Array:
        if len(shape) == 1:
            return part.of(np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32))
        (first, last), (left, right) = part.interval(0, shape[0]), part.interval(1, shape[1])
        blocks = range(first // BLOCK_ROWS, -(-min(last, shape[0]) // BLOCK_ROWS))
        # Contiguous: a view would keep the whole block.
        rows = [np.ascontiguousarray(self._block(name, number, shape)[:, left:right]) for number in blocks]
        drawn = np.concatenate(rows) if rows else np.zeros((0, right - left), np.float32)
        start = blocks.start * BLOCK_ROWS
        drawn = drawn[first - start : last - start]
        return drawn if part.axis is None else part.pad(drawn, (last - first, right - left)[part.axis])

    def uniform(self, name: str, shape: tuple[int, ...], part: Slice, largest: float) -> Array:
        """A part of a small matrix, uniform between -largest and largest."""
        drawn = np.random.default_rng(self._key(f"{name}/uniform")).random(shape, np.float32)
        return part.of(largest * (2 * drawn - 1))

    def _key(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:8], "big")

    def _block(self, name: str, number: int, shape: tuple[int, ...]) -> Array:
        key = self._key(f"{name}/{number}")
        rows = min(BLOCK_ROWS, shape[0] - number * BLOCK_ROWS)
        return self.deviation * np.random.default_rng(key).standard_normal((rows, shape[1]), np.float32)


@dataclass(eq=False)
class ShardedParameter:
    """A weight, or the slice of it that this rank holds, and its gradient."""

    name: str  # PaddleNLP's name of the whole weight
    shape: tuple[int, ...]  # of the whole weight, without padding
    slice: Slice
    tensor: Any
    sum_group: Any  # ranks over whose tokens the gradient is summed; they hold the same part; None: this rank alone
    replicas: int  # ranks of the world that hold these same values, before any ZeRO
    first_copy: bool = True  # whether no lower rank outside of sum_group holds these values
    gradient_dtype: str = "float32"  # in which gradients are summed over micro-batches
    presum_group: Any = None  # ranks that hold copies of these values and sum the copies' gradients first
    presum_across_stages: bool = False  # these ranks are in different stages: not before the step's last backward
    sharded: bool = True  # by ZeRO, if it is a matrix
    expert: bool = False  # of a routed expert, whose dp type is its own
    summed: Any = None  # gradient that autograd does not keep: of another type than the tensor, or reduced
    stacked: tuple[ShardedParameter, ...] = ()  # weights that lie in the tensor one after the other, and have none

    @property
    def members(self) -> tuple[ShardedParameter, ...]:
        """The weights of the model that lie in the tensor one after the other, equally large."""
        return self.stacked or (self,)

    def held(self) -> list[tuple[ShardedParameter, Any]]:
        """Each member, and a parameter on its values."""
        if not self.stacked:
            return [(self, self.tensor)]
        shape, held = list(self.tensor.shape[1:]), []
        for place, member in enumerate(self.stacked):
            held.append((member, zero_parameter(shape, self.tensor.dtype)))
            open_window(held[-1][1], self.tensor, place, place + 1, shape)
        return held

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: as in PaddleNLP's trainer, not to norms and biases."""
        return len(self.shape) > 1

    @property
    def gradient(self) -> Any:
        """Sum over the micro-batches so far, and over ranks once it is reduced."""
        return self.tensor.grad if self.summed is None else self.summed

    def accumulate(self, gradient: Any) -> None:
        """Add one micro-batch's gradient."""
        self.summed = add(self.summed, gradient, self.gradient_dtype)

    def accumulate_autograd(self) -> None:
        """Adds the gradient of autograd to the sum, where sums are kept in fp32; called after each micro-batch."""
        if not has_dtype(self.tensor, self.gradient_dtype) and self.tensor.grad is not None:
            self.accumulate(self.tensor.grad)
            self.tensor.clear_gradient(False)

    def drop_gradient(self) -> None:
        self.summed = None
        self.tensor.clear_gradient(False)

    def publish(self, updated: Any) -> None:
        """Take over the values of the tensor that the optimizer has updated, where that is a copy."""
        if updated is not self.tensor:
            paddle.assign(cast(updated, self.tensor.dtype), output=self.tensor)

    def published(self) -> None:
        """Returns at once: the values are there."""


def compute_weight(weight: ShardedParameter, numbers: Numbers) -> Any:
    """A weight in the type that layers compute in. Its gradient is added to `weight` all the same."""
    if not numbers.casts:
        return weight.tensor
    if weight.tensor.stop_gradient:  # frozen
        return weight.tensor.astype(numbers.computed)
    anchor = paddle.zeros([1])  # an input without gradient would not be recorded: the weight itself is not tracked
    anchor.stop_gradient = False
    return _Cast.apply(anchor, weight, numbers.computed)


@contextmanager
def compute_weights(slots: Sequence[tuple[Any, str, ShardedParameter]], numbers: Numbers) -> Iterator[None]:
    """Let layers find their weights in the type that they compute in. Slots: layer, attribute, weight."""
    if not numbers.casts:
        yield
        return
    for layer, attribute, weight in slots:
        place_parameter(layer, attribute, compute_weight(weight, numbers))
    try:
        yield
    finally:
        for layer, attribute, weight in slots:
            place_parameter(layer, attribute, weight.tensor)


class _Cast(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, anchor: Any, weight: ShardedParameter, dtype: str) -> Any:
        ctx.weight = weight
        return weight.tensor.astype(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.weight.accumulate(grad)
        return None


def stacked(weights: Iterable[ShardedParameter], count: int) -> ShardedParameter:
    """`count` slices [...] of one shape, which the same ranks hold, as one tensor [count, ...]: one gradient, and one
    message. Each is made when its turn comes, and is gone when the next one is made."""
    members: list[ShardedParameter] = []
    tensor: Any = None
    for place, weight in enumerate(weights):
        shape = list(weight.tensor.shape)
        if tensor is None:
            tensor = zero_parameter([count, *shape], weight.tensor.dtype)
        with paddle.no_grad():
            paddle.assign(weight.tensor, output=window(tensor.detach(), place, place + 1, shape))
        weight.tensor = None
        members.append(weight)
    return replace(members[0], shape=(count, *members[0].shape), tensor=tensor, stacked=tuple(members))


def make_parameter(
    source: WeightSource, name: str, shape: tuple[int, ...], part: Slice, dtype: str, holders: Any = None
) -> Any:
    """A Paddle parameter that holds the part of a weight. `holders`: the group of ranks that hold the same, if any."""
    intervals = (part.interval(axis, length) for axis, length in enumerate(shape))
    parameter = zero_parameter([stop - start for start, stop in intervals], dtype)
    once = holders is not None and getattr(source, "from_files", False)
    if not once or holders.rank == 0:
        parameter.set_value(paddle.to_tensor(source(name, shape, part)).astype(dtype))
    if once:
        broadcast(parameter.detach(), holders)
    return parameter


def zero_parameter(shape: list[int], dtype: Any) -> Any:
    """A Paddle parameter of zeros."""
    return paddle.create_parameter(shape, dtype, default_initializer=paddle.nn.initializer.Constant(0.0))


def shard_layer(layer: Any, make: Callable[[str], ShardedParameter]) -> list[tuple[Any, str, ShardedParameter]]:
    """Replace every parameter of a Paddle layer that was built without data by this rank's part.

    `make` gives the part of a parameter by its name in the layer. Returns where the parts are: sub-layer, attribute,
    record.
    """
    slots = []
    for local_name, _ in list(layer.named_parameters()):
        owner_name, _, attribute = local_name.rpartition(".")
        owner = layer
        for step in filter(None, owner_name.split(".")):
            owner = getattr(owner, step)
        record = make(local_name)
        setattr(owner, attribute, record.tensor)
        slots.append((owner, attribute, record))
    return slots
