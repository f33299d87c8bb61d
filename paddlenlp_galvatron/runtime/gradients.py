"""Gradients after the last micro-batch: reduced over the ranks with other tokens, clipped by their global norm, and
used by the optimizer, whose states are on the device or in host memory.

From host memory the update copies moments and fp32 masters to the device in parts and back. Copies to the device,
kernels and copies to the host use separate streams and overlap: a part's states go to one of two buffers, after the
part before last has left it. Gradients and the weights of layers stay on the device.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import paddle

from ..base.buckets import in_buckets
from ..base.units import FP32_BYTES, MIB
from ..launch.status import waiting
from ..plan.strategy import PART, PLACES, STATES
from . import device
from .collectives import all_reduce
from .paddle_private import STATES_IN_HOST, begin_update, moments_of, move_to_host, part_of, squared_norm, update_part
from .precision import cast
from .units import Trainable, in_fp32
from .weights import ShardedParameter

# One message per this much gradient: large enough to use a link's bandwidth, small enough to hold twice.
BUCKET_BYTES = 32 * MIB
# The optimizer handles this much fp32 gradient at a time, or one tensor: small next to the freed activations. Each turn
# walks all its parameters, 0.1 ms on the host for a few hundred.
TURN_BYTES = 512 * MIB


def reduce_gradients(parameters: Sequence[ShardedParameter]) -> None:
    """Reduce every gradient over the copies of its values and over its parameter's ranks, in buckets by group."""
    for groups in ([each.presum_group for each in parameters], [each.sum_group for each in parameters]):
        buckets: dict[tuple[int, Any], list[ShardedParameter]] = {}
        for parameter, group in zip(parameters, groups, strict=True):
            if group is not None:
                buckets.setdefault((group.id, parameter.gradient.dtype), []).append(parameter)
        by_id = {group.id: group for group in groups if group is not None}
        for (group_id, _), members in buckets.items():
            size_bytes = [int(each.gradient.size) * int(each.gradient.element_size()) for each in members]
            for bucket in in_buckets(members, size_bytes, BUCKET_BYTES):
                _reduce_bucket(bucket, by_id[group_id])


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
    """Euclidean norm of the whole model's gradient; values on several ranks count once."""
    squares: dict[float, list[Any]] = {}  # gradients, keyed by this rank's share of each value
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
    """Update all tensors with gradients scaled by `factor`, and start sending each value as soon as it is ready. The
    next forward pass waits for a module's values when it reaches the module.

    The optimizer skips tensors without a gradient: each tensor gets its fp32 gradient only for its turn.
    """
    ready = [trainable for trainable in trainables if trainable.tensor.grad is not None]
    others = [trainable for trainable in trainables if trainable.tensor.grad is None]
    turns = in_buckets(others, [int(trainable.tensor.size) * FP32_BYTES for trainable in others], TURN_BYTES)
    for turn in [*([ready] if ready else []), *turns]:
        for trainable in turn:
            trainable.present_gradient(factor)
        optimizer.step()
        for trainable in turn:
            trainable.updated()


def offload(trainables: Sequence[Trainable]) -> None:
    """Move the optimizer's tensors to host memory, except weights that layers read. Moments are created there."""
    for trainable in trainables:
        trainable.tensor.optimize_attr[STATES_IN_HOST] = True
        if trainable.tensor is not trainable.owner.writable():
            move_to_host(trainable.tensor)


class HostStates:
    """The buffers on the device, allocated before the first step, and the update through them."""

    def __init__(self) -> None:
        self._places = [[paddle.empty([PART], "float32") for _ in range(STATES)] for _ in range(PLACES)]
        self._left = [device.event_here() for _ in range(PLACES)]  # events after each buffer's copies to the host
        self._to_device, self._to_host = device.CopyStream(), device.CopyStream()
        self._parts = 0  # updated so far

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def update(self, optimizer: Any, trainables: Sequence[Trainable], factor: float) -> None:
        """Like `update_in_turns`, with states in host memory. The host does not block."""
        begin_update(optimizer)
        for trainable in trainables:
            values, gradient = trainable.owner.writable(), trainable.gradient
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            for start in range(0, int(values.size), PART):
                stop = min(start + PART, int(values.size))
                piece = part_of(gradient, start, stop)
                self._update_part(optimizer, trainable, part_of(values, start, stop), piece, factor, start, stop)
            trainable.drop_gradient()
            trainable.owner.publish(values)

    def _update_part(
        self, optimizer: Any, trainable: Trainable, values: Any, gradient: Any, factor: float, start: int, stop: int
    ) -> None:
        """Elements `start..stop-1` of a tensor. `values`: on the device, in the type that layers read."""
        slot, tensor = self._parts % PLACES, trainable.tensor
        has_master = tensor is not trainable.owner.writable()
        states = [*([tensor] if has_master else []), *moments_of(optimizer, tensor)]
        at_home = [part_of(state, start, stop) for state in states]
        visiting = [part_of(each, 0, stop - start) for each in self._places[slot]][: len(states)]
        with self._to_device.after(self._left[slot]):
            _copy(at_home, visiting)
            arrived = device.event_here()
        gradient = in_fp32(gradient)
        if factor != 1.0:
            gradient.scale_(factor)
        device.wait_in_stream(arrived)
        master, moments = (visiting[0], visiting[1:]) if has_master else (values, visiting)
        update_part(optimizer, tensor, master, gradient, moments, last=stop == int(tensor.size))
        if has_master:
            paddle.assign(cast(master, values.dtype), output=values)
        with self._to_host.after(device.event_here()):
            _copy(visiting, at_home)
            self._left[slot] = device.event_here()
        self._parts += 1


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Queue copies to the targets."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, False)
