"""Frozen weights, beside which adapters learn: no gradients, no fp32 masters, no optimizer states.

Under ddp and zero2 they are whole; under zero3 sharded and gathered for each pass. Nothing of theirs is ever reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.lora import is_factor
from ..plan import DataParallel
from ..plan.comm_points import WEIGHT_OPS
from .units import ShardedUnit, Trainable, Unit, UnitMaker
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


class FrozenUnits(UnitMaker):
    """Makes the units of modules of which adapters alone learn: those are few, small and whole, as vectors are."""

    def adopt(
        self, parameters: Sequence[ShardedParameter], dp_type: DataParallel, of_experts: DataParallel | None = None
    ) -> None:
        base = [weight for weight in parameters if not is_factor(weight.name)]
        self.vectors += [weight for weight in parameters if is_factor(weight.name)]
        self.frozen += [weight for weight in base if len(weight.shape) == 1]
        matrices = [weight for weight in base if len(weight.shape) > 1]
        key = tuple(id(weight) for weight in matrices)
        if key not in self.made:
            self.made[key] = (_frozen_unit(matrices, dp_type),)
        for weight in base:
            weight.tensor.stop_gradient = True
        self.chain.append(self.made[key])


def _frozen_unit(matrices: Sequence[ShardedParameter], dp_type: DataParallel) -> Unit:
    group = matrices[0].sum_group
    if group is None or WEIGHT_OPS[dp_type].gather is None:
        return _Frozen(matrices, None)
    return FrozenShards(matrices, group, every_micro_batch=False, keep_whole=False)
