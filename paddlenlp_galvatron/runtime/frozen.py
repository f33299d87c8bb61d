"""Frozen weights, beside which adapters learn: no gradients, no fp32 masters, no optimizer states.

Under ddp and zero2 they are whole; under zero3 sharded and gathered for each pass. Nothing of theirs is ever reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import DataParallel
from ..plan.seams import WEIGHT_OPS
from .units import ShardedUnit, Trainable, Unit
from .weights import ShardedParameter


class _Frozen(Unit):
    sends_whole = False

    def make_trainables(self) -> list[Trainable]:
        return []

    def backward_done(self, last: bool) -> None:
        pass

    def finish(self) -> None:
        pass

    def take(self) -> None:
        pass


class FrozenShards(_Frozen, ShardedUnit):
    """Sharded over the group."""

    sends_whole = False


def frozen_unit(weights: Sequence[ShardedParameter], dp_type: DataParallel) -> Unit:
    """The unit of a module's frozen matrices."""
    group = weights[0].sum_group
    if group is None or WEIGHT_OPS[dp_type].gather is None:
        unit: Unit = _Frozen(weights, None)
    else:
        unit = FrozenShards(weights, group, every_micro_batch=False, keep_whole=False)
    for weight in weights:
        weight.tensor.stop_gradient = True
    return unit
