"""Gradients after the last micro-batch: summed over the ranks that saw other tokens, clipped by their global norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import paddle

from .collectives import all_reduce
from .units import Piece, Trainable
from .weights import ShardedParameter

# One message per this much gradient: large enough to use a link's bandwidth, small enough to hold twice.
BUCKET_BYTES = 32 * 2**20


def reduce_gradients(parameters: Sequence[ShardedParameter]) -> None:
    """Sum every gradient over the copies of its values and over its parameter's ranks, in buckets of like group."""
    buckets: dict[tuple[int, Any], list[ShardedParameter]] = {}
    for parameter in parameters:
        all_reduce(parameter.tensor.grad, parameter.presum_group)
        if parameter.sum_group is not None:
            buckets.setdefault((parameter.sum_group.id, parameter.tensor.dtype), []).append(parameter)
    for members in buckets.values():
        for bucket in _by_size(members):
            _reduce_bucket(bucket)


def _by_size(members: list[ShardedParameter]) -> list[list[ShardedParameter]]:
    buckets: list[list[ShardedParameter]] = []
    filled = BUCKET_BYTES
    for parameter in members:
        size = parameter.tensor.size * parameter.tensor.element_size()
        if filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return buckets


@paddle.no_grad()  # type: ignore[untyped-decorator]
def _reduce_bucket(bucket: list[ShardedParameter]) -> None:
    group = bucket[0].sum_group
    if len(bucket) == 1:
        all_reduce(bucket[0].tensor.grad, group)
        return
    gradients = [parameter.tensor.grad for parameter in bucket]
    joined = all_reduce(paddle.concat([grad.flatten() for grad in gradients]), group)
    for grad, part in zip(gradients, paddle.split(joined, [grad.size for grad in gradients]), strict=True):
        paddle.assign(part.reshape(grad.shape), output=grad)


@paddle.no_grad()  # type: ignore[untyped-decorator]
def global_norm(trainables: Sequence[Trainable], world_group: Any) -> float:
    """Euclidean norm of the whole model's gradient, each value counted once however many ranks hold it."""
    square = paddle.zeros([1], "float32")
    for trainable in trainables:
        gradient = trainable.gradient.flatten().astype("float32")
        for pieces in _by_replicas(trainable):
            start, stop = pieces[0].offset, pieces[-1].offset + pieces[-1].stop - pieces[-1].start
            square += gradient[start:stop].square().sum() * (trainable.sharding / pieces[0].weight.replicas)
    return float(all_reduce(square, world_group).sqrt())


def _by_replicas(trainable: Trainable) -> Iterator[list[Piece]]:
    """Neighbouring pieces that equally many ranks hold, together."""
    for _, pieces in groupby(trainable.pieces, key=lambda piece: piece.weight.replicas):
        yield list(pieces)


@paddle.no_grad()  # type: ignore[untyped-decorator]
def clip_gradients(trainables: Sequence[Trainable], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    if norm > max_norm:
        for trainable in trainables:
            trainable.gradient.scale_(max_norm / norm)
