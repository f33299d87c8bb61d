"""Optimizer states in the host's memory: the moments, and the fp32 weights of 16-bit ones.

The update brings them to the device part by part and back. Copies to the device, kernels and copies to the host have
a stream each and overlap: a part's states come to one of two places, when those of the part before last have left it.
Gradients, and weights that layers read, stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from ..plan.strategy import PART, PLACES, STATES
from . import device
from .paddle_private import STATES_IN_HOST, begin_update, moments_of, move_to_host, part_of, update_part
from .precision import cast
from .units import Trainable, in_fp32


def offload(trainables: Sequence[Trainable]) -> None:
    """Move the optimizer's tensors to the host's memory, except weights that layers read. Moments are made there."""
    for trainable in trainables:
        trainable.tensor.optimize_attr[STATES_IN_HOST] = True
        if trainable.tensor is not trainable.owner.writable():
            move_to_host(trainable.tensor)


class HostStates:
    """The places on the device, made before the first step, and the update through them."""

    def __init__(self) -> None:
        self._places = [[paddle.empty([PART], "float32") for _ in range(STATES)] for _ in range(PLACES)]
        self._left = [device.event_here() for _ in range(PLACES)]  # behind the copies from each place to the host
        self._to_device, self._to_host = device.CopyStream(), device.CopyStream()
        self._parts = 0  # updated so far

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def update(self, optimizer: Any, trainables: Sequence[Trainable], factor: float) -> None:
        """As `update_in_turns`, on states in the host's memory. The host waits for nothing."""
        begin_update(optimizer)
        for trainable in trainables:
            values, gradient = trainable.owner.writable(), trainable.gradient
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            for start in range(0, int(values.size), PART):
                stop = min(start + PART, int(values.size))
                part = part_of(gradient, start, stop)
                self._update_part(optimizer, trainable, part_of(values, start, stop), part, factor, start, stop)
            trainable.drop_gradient()
            trainable.owner.publish(values)

    def _update_part(
        self, optimizer: Any, trainable: Trainable, values: Any, gradient: Any, factor: float, start: int, stop: int
    ) -> None:
        """Numbers `start..stop-1` of a tensor. `values`: on the device, of the type that layers read."""
        place, tensor = self._parts % PLACES, trainable.tensor
        has_master = tensor is not trainable.owner.writable()
        states = [*([tensor] if has_master else []), *moments_of(optimizer, tensor)]
        at_home = [part_of(state, start, stop) for state in states]
        visiting = [part_of(each, 0, stop - start) for each in self._places[place]][: len(states)]
        with self._to_device.after(self._left[place]):
            _copy(at_home, visiting)
            arrived = device.event_here()
        gradient = in_fp32(gradient)
        if factor != 1.0:
            gradient.scale_(factor)
        device.compute_after(arrived)
        master, moments = (visiting[0], visiting[1:]) if has_master else (values, visiting)
        update_part(optimizer, tensor, master, gradient, moments, last=stop == int(tensor.size))
        if has_master:
            paddle.assign(cast(master, values.dtype), output=values)
        with self._to_host.after(device.event_here()):
            _copy(visiting, at_home)
            self._left[place] = device.event_here()
        self._parts += 1


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Queue copies to where the targets are."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, False)
