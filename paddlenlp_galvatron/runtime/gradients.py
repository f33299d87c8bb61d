"""Gradients after the last micro-batch: reduced over the ranks with other tokens, clipped by their global norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeVar

import paddle

from ..base.units import FP32_BYTES, MIB
from ..launch.status import waiting
from .collectives import all_reduce
from .paddle_private import squared_norm
from .precision import cast
from .units import Trainable
from .weights import ShardedParameter

T = TypeVar("T")

# One message per this much gradient: large enough to use a link's bandwidth, small enough to hold twice.
BUCKET_BYTES = 32 * MIB
# The optimizer sees this much fp32 gradient at a time, or one tensor: little besides the activations that are gone by
# then. In each turn it walks all its parameters, 0.1 ms on the host for some hundreds of them.
TURN_BYTES = 512 * MIB


def reduce_gradients(parameters: Sequence[ShardedParameter]) -> None:
    """Sum every gradient over the copies of its values and over its parameter's ranks, in buckets of like group."""
    for groups in ([each.presum_group for each in parameters], [each.sum_group for each in parameters]):
        buckets: dict[tuple[int, Any], list[ShardedParameter]] = {}
        for parameter, group in zip(parameters, groups, strict=True):
            if group is not None:
                buckets.setdefault((group.id, parameter.gradient.dtype), []).append(parameter)
        by_id = {group.id: group for group in groups if group is not None}
        for (group_id, _), members in buckets.items():
            size_bytes = [int(each.gradient.size) * int(each.gradient.element_size()) for each in members]
            for bucket in _by_size(members, size_bytes, BUCKET_BYTES):
                _reduce_bucket(bucket, by_id[group_id])


def _by_size(members: Sequence[T], size_bytes: Sequence[int], limit: int) -> list[list[T]]:
    """Members in order, in buckets of at most `limit` bytes or one member."""
    buckets: list[list[T]] = []
    filled = limit
    for member, size in zip(members, size_bytes, strict=True):
        if filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(member)
        filled += size
    return buckets


@paddle.no_grad()  # type: ignore[untyped-decorator]
def _reduce_bucket(bucket: list[ShardedParameter], group: Any) -> None:
    if len(bucket) == 1:
        all_reduce(bucket[0].gradient, group)
        return
    gradients = [parameter.gradient for parameter in bucket]
    joined = all_reduce(paddle.concat([grad.flatten() for grad in gradients]), group)
    for grad, reduced in zip(gradients, paddle.split(joined, [grad.size for grad in gradients]), strict=True):
        paddle.assign(reduced.reshape(grad.shape), output=grad)


@paddle.no_grad()  # type: ignore[untyped-decorator]
def global_norm(trainables: Sequence[Trainable], world_group: Any) -> float:
    """Euclidean norm of the whole model's gradient, each value counted once however many ranks hold it."""
    squares: dict[float, list[Any]] = {}  # by the share of them that is this rank's
    for trainable in trainables:
        gradient = cast(trainable.gradient, "float32")
        alike = [[*pieces] for _, pieces in groupby(trainable.pieces, key=lambda piece: piece.weight.replicas)]
        for pieces in alike:
            start, stop = pieces[0].offset, pieces[-1].offset + pieces[-1].stop - pieces[-1].start
            shard = gradient if len(alike) == 1 else gradient.flatten()[start:stop]  # padding is 0
            squares.setdefault(trainable.sharding / pieces[0].weight.replicas, []).append(squared_norm(shard))
    square = paddle.zeros([1], "float32")
    for share, parts in squares.items():
        square += share * paddle.concat(parts).sum()
    with waiting("all_reduce of the norm over all ranks"):  # on a GPU this is where a rank waits
        return float(all_reduce(square, world_group).sqrt())


@paddle.no_grad()  # type: ignore[untyped-decorator]
def update_in_turns(optimizer: Any, trainables: Sequence[Trainable], factor: float) -> None:
    """Let the optimizer update all tensors, gradients scaled by `factor`, and start passing the values on, each as soon
    as it is there. Each use of one waits for it: the next forward pass, when it comes to that module.

    The optimizer skips tensors without a gradient: those whose gradient is kept elsewhere get it, in fp32, only while
    their turn lasts.
    """
    ready = [trainable for trainable in trainables if trainable.tensor.grad is not None]
    others = [trainable for trainable in trainables if trainable.tensor.grad is None]
    turns = _by_size(others, [int(trainable.tensor.size) * FP32_BYTES for trainable in others], TURN_BYTES)
    for turn in [*([ready] if ready else []), *turns]:
        for trainable in turn:
            trainable.present_gradient(factor)
        optimizer.step()
        for trainable in turn:
            trainable.updated()
