"""Sources of weights and each rank's slices: the same model under every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, Protocol

import numpy as np
import paddle
from paddle.autograd import PyLayer

from ..plan.precision import NumberTypes
from .collectives import broadcast
from .paddle_private import flattened, place_parameter, share, window
from .precision import add, cast, has_dtype

Array = np.ndarray[Any, np.dtype[np.float32]]

# Rows and columns of a matrix that are drawn at once: a rank draws little beyond its slice, and the start-up costs a
# tenth of drawing 8,192 numbers.
TILE = 64, 128


@dataclass(frozen=True)
class Slice:
    """Part `index` of `parts` equal parts along `axis`; axis None: the whole. `padded`: the axis's length with padding,
    if it does not split evenly."""

    axis: int | None = None
    index: int = 0
    parts: int = 1
    padded: int | None = None

    def interval(self, axis: int, length: int) -> tuple[int, int]:
        """First and last-plus-one index of an axis that the part holds; elements beyond its length are padding."""
        if axis != self.axis:
            return 0, length
        size = (self.padded or length) // self.parts
        return self.index * size, (self.index + 1) * size

    def of(self, whole: Array) -> Array:
        """This part of a whole array, padded with zeros."""
        intervals = (self.interval(axis, length) for axis, length in enumerate(whole.shape))
        return self.pad(whole[tuple(slice(start, stop) for start, stop in intervals)], whole.shape)

    def size(self, shape: tuple[int, ...]) -> list[int]:
        """Size of this part of a weight."""
        return [stop - start for start, stop in (self.interval(axis, length) for axis, length in enumerate(shape))]

    def pad(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Fill the part of a weight up to its size."""
        padding = [(0, size - length) for size, length in zip(self.size(shape), array.shape, strict=True)]
        return np.ascontiguousarray(np.pad(array, padding) if any(more for _, more in padding) else array)


WHOLE = Slice()


@dataclass(frozen=True)
class Rows(Slice):
    """Rows `first..last-1` of a slice, counted from its own first one."""

    first: int = 0
    last: int = 0

    def interval(self, axis: int, length: int) -> tuple[int, int]:
        start, stop = super().interval(axis, length)
        return (start, stop) if axis else (start + self.first, start + self.last)


class WeightSource(Protocol):
    """Returns a rank's slice of a weight, by PaddleNLP's name and whole shape. Replicas each read a share and exchange
    them."""

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array: ...


@dataclass(frozen=True)
class SeededWeights:
    """Random weights that depend only on the seed and the weight's name: norms are 1, biases 0, the rest normal.

    Matrices are drawn in tiles, each from its own offset in the weight's sequence, so that drawing a part takes little
    extra time and memory.
    """

    seed: int
    deviation: float  # standard deviation of the normal weights

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        if len(shape) == 1:
            return rank_slice.of(np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32))
        out = np.zeros(rank_slice.size(shape), np.float32)  # zeros beyond the weight are padding
        (top, bottom), (left, right) = (rank_slice.interval(axis, length) for axis, length in enumerate(shape))
        bottom, right = min(bottom, shape[0]), min(right, shape[1])
        first = left // TILE[1] * TILE[1]
        for row in range(top // TILE[0] * TILE[0], bottom if left < right else 0, TILE[0]):
            tiles = np.hstack([self._tile(name, shape, row, column) for column in range(first, right, TILE[1])])
            start, stop = max(row, top), min(row + TILE[0], bottom)
            drawn = tiles[start - row : stop - row, left - first : right - first]
            np.multiply(drawn, self.deviation, out=out[start - top : stop - top, : right - left])
        return out

    def uniform(self, name: str, shape: tuple[int, ...], rank_slice: Slice, largest: float) -> Array:
        """A part of a small matrix, uniform between -largest and largest."""
        drawn = np.random.default_rng(self._key(f"{name}/uniform")).random(shape, np.float32)
        return rank_slice.of(largest * (2 * drawn - 1))

    def _key(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:16], "big")

    def _tile(self, name: str, shape: tuple[int, ...], row: int, column: int) -> Array:
        number = row // TILE[0] * -(-shape[1] // TILE[1]) + column // TILE[1]
        numbers = np.random.Philox(key=self._key(name), counter=number << 128)  # far from those of the next tile
        return np.random.Generator(numbers).standard_normal(TILE, np.float32)


@dataclass(eq=False)
class ShardedParameter:
    """A weight, or the slice of it that this rank holds, and its gradient."""

    name: str  # PaddleNLP's name of the whole weight
    shape: tuple[int, ...]  # shape of the whole weight, without padding
    slice: Slice
    tensor: Any
    sum_group: Any  # ranks over whose tokens the gradient is summed; they hold the same part; None: this rank alone
    replicas: int  # ranks of the world that hold these same values, before any ZeRO
    first_copy: bool = True  # whether no lower rank outside of sum_group holds these values
    gradient_dtype: str = "float32"  # dtype of gradients summed over micro-batches
    shard_group: Any = None  # subset of sum_group over which ZeRO shards; None: all of it
    replica_group: Any = None  # ranks with the same shard
    presum_group: Any = None  # ranks that hold copies of these values and sum the copies' gradients first
    presum_across_stages: bool = False  # ranks of several stages: reduced after the last backward
    sharded: bool = True  # sharded by ZeRO, if it is a matrix
    expert: bool = False  # whether of a routed expert, with its own dp type
    state: bool = False  # its gradient is always 0
    summed: Any = None  # gradient outside autograd: of another type, made in forward, or reduced
    stacked: tuple[ShardedParameter, ...] = ()  # consecutive weights inside the tensor, without tensors
    source: WeightSource | None = None  # source of the initial values

    @property
    def members(self) -> tuple[ShardedParameter, ...]:
        """The weights of the model that are stacked in the tensor."""
        return self.stacked or (self,)

    def held(self) -> list[tuple[ShardedParameter, Any]]:
        """Pairs of a member and the parameter that holds its values."""
        if not self.stacked:
            return [(self, self.tensor)]
        shape, pairs = list(self.tensor.shape[1:]), []
        for index, member in enumerate(self.stacked):
            pairs.append((member, zero_parameter(shape, self.tensor.dtype)))
            share(pairs[-1][1], self.tensor, index, index + 1)
        return pairs

    def first_values(self, start: int, stop: int) -> Array:
        """Initial elements `start..stop-1` of the flattened slice; only their rows are read."""
        assert self.source is not None
        width = prod(self.slice.size(self.shape)[1:])
        first, last = start // width, -(-stop // width)
        rows = self.source(self.name, self.shape, Rows(**vars(self.slice), first=first, last=last))
        return rows.reshape(-1)[start - first * width : stop - first * width]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: as in PaddleNLP's trainer, not to norms, biases and states."""
        return len(self.shape) > 1 and not self.state

    @property
    def gradient(self) -> Any:
        """Sum over the micro-batches so far; after reduction also over ranks."""
        if self.state:
            return paddle.zeros_like(self.tensor)
        return self.tensor.grad if self.summed is None else self.summed

    def accumulate(self, gradient: Any) -> None:
        """Add one micro-batch's gradient."""
        self.summed = add(self.summed, gradient, self.gradient_dtype)

    def accumulate_autograd(self) -> None:
        """Adds autograd's gradient to a separate sum, if any; called after each micro-batch."""
        kept = self.summed is not None or not has_dtype(self.tensor, self.gradient_dtype)
        if kept and self.tensor.grad is not None:
            self.accumulate(self.tensor.grad)
            self.tensor.clear_gradient(False)

    def drop_gradient(self) -> None:
        self.summed = None
        self.tensor.clear_gradient(False)

    def writable(self) -> Any:
        """The tensor that receives updated values, without readers now."""
        return self.tensor

    def publish(self, updated: Any) -> None:
        """Copy the values from the optimizer's tensor, if it is a copy."""
        if updated is not self.tensor:
            paddle.assign(cast(updated, self.tensor.dtype), output=self.tensor)

    def published(self) -> None:
        """Returns at once: the values are ready."""


def compute_weight(weight: ShardedParameter, numbers: NumberTypes) -> Any:
    """A weight in the compute type. Its gradient is still added to `weight`."""
    if not numbers.casts:
        return weight.tensor
    if weight.tensor.stop_gradient:  # frozen
        return weight.tensor.astype(numbers.computed.dtype)
    anchor = paddle.zeros([1])  # autograd records only inputs with gradients, and the weight has none
    anchor.stop_gradient = False
    return _Cast.apply(anchor, weight, numbers.computed.dtype)


@contextmanager
def compute_weights(slots: Sequence[tuple[Any, str, ShardedParameter]], numbers: NumberTypes) -> Iterator[None]:
    """Give layers their weights in the compute type. Slots: layer, attribute, weight."""
    if not numbers.casts:
        yield
        return
    learning = [slot for slot in slots if not slot[2].state]
    for layer, attribute, weight in learning:
        place_parameter(layer, attribute, compute_weight(weight, numbers))
    try:
        yield
    finally:
        for layer, attribute, weight in learning:
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
    """`count` slices [...] of one shape on the same ranks as one tensor [count, ...]: one gradient and one message."""
    members = tuple(weights)
    size, dtype = members[0].tensor.shape, members[0].tensor.dtype
    for member in members:
        member.tensor = None
    tensor = zero_parameter([count, *size], dtype)
    return replace(members[0], shape=(count, *members[0].shape), tensor=tensor, stacked=members)


def within(
    weights: Iterable[ShardedParameter], start: int, stop: int
) -> Iterator[tuple[ShardedParameter, int, int, int]]:
    """Divides the elements `start..stop-1` of consecutive weights: each weight, the first and last-plus-one element of
    its flattened slice (equal: none), and their offset from `start`."""
    offset = 0
    for weight in (member for outer in weights for member in outer.members):
        length = prod(weight.slice.size(weight.shape))
        low, high = (min(max(edge - offset, 0), length) for edge in (start, stop))
        yield weight, low, high, max(offset - start, 0)
        offset += length


def fill(weights: Sequence[ShardedParameter], flat: Any, start: int = 0) -> None:
    """Write the first values of consecutive weights, from `start` on, into a flat tensor."""
    for weight, low, high, offset in within(weights, start, start + int(flat.size)):
        if low < high:
            values = paddle.to_tensor(weight.first_values(low, high))
            paddle.assign(values.astype(flat.dtype), output=window(flat, offset, offset + high - low, [high - low]))


def fill_whole(weight: ShardedParameter) -> None:
    """Give a small weight its first values, made by the first rank that holds it."""
    if weight.sum_group is None or weight.sum_group.rank == 0:
        fill([weight], flattened(weight.tensor))
    if weight.sum_group is not None:
        broadcast(weight.tensor.detach(), weight.sum_group)


def zero_parameter(shape: list[int], dtype: Any) -> Any:
    """A Paddle parameter of zeros."""
    return paddle.create_parameter(shape, dtype, default_initializer=paddle.nn.initializer.Constant(0.0))


def shard_layer(layer: Any, make: Callable[[str], ShardedParameter]) -> list[tuple[Any, str, ShardedParameter]]:
    """Replace every parameter of a Paddle layer, built without data, by this rank's part.

    `make` gives the part of a parameter by its name in the layer. Returns the parts' slots: sub-layer, attribute,
    record.
    """
    slots = []
    for local_name, _ in list(layer.named_parameters()):
        *owners, attribute = local_name.split(".")
        owner = reduce(getattr, owners, layer)
        record = make(local_name)
        setattr(owner, attribute, record.tensor)
        slots.append((owner, attribute, record))
    return slots
