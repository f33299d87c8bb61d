"""The units of a stage's modules in the order of the forward pass.

Each is made when its module is built. Its weights are present while the module runs, and its gradients are reduced when
the module's last backward pass is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paddle.autograd import PyLayer

from ..plan import DataParallel
from .units import Unit, make_unit
from .weights import ShardedParameter, fill_whole

Units = tuple[Unit, ...]  # units of one module: its matrices, and its experts


class UnitMaker:
    """Makes the units of a stage, each as soon as its module is built: under zero3 a rank never holds the whole weights
    of more than one."""

    def __init__(self, every_micro_batch: bool):
        self.chain: list[Units] = []  # of each module, in the order of the forward pass
        self.vectors: list[ShardedParameter] = []  # norms and biases
        self.frozen: list[ShardedParameter] = []  # frozen weights
        self._every_micro_batch = every_micro_batch
        self.made: dict[tuple[int, ...], Units] = {}  # by the matrices: tied vocabulary layers share a unit

    def adopt(
        self, parameters: Sequence[ShardedParameter], dp_type: DataParallel, of_experts: DataParallel | None = None
    ) -> None:
        """Add a module's weights. `of_experts`: the dp type of its experts, if any."""
        units: dict[Any, list[ShardedParameter]] = {}
        for weight in parameters:
            units.setdefault(self._unit_of(weight), []).append(weight)
        vectors = units.pop(None, [])
        for vector in vectors:
            fill_whole(vector)
        self.vectors += vectors
        key = tuple(id(weight) for weights in units.values() for weight in weights)
        if key not in self.made:
            types = {False: dp_type, True: of_experts or dp_type}
            self.made[key] = tuple(self._make(weights, types[weights[0].expert]) for weights in units.values())
            for unit in self.made[key]:
                unit.deferred = any(weight.presum_across_stages for weight in unit.weights)
                unit.begin()
        self.chain.append(self.made[key])

    def _unit_of(self, weight: ShardedParameter) -> Any:
        """Add the matrices of one unit of a module; None: outside units."""
        return weight.expert if weight.sharded and len(weight.shape) > 1 else None

    def _make(self, weights: Sequence[ShardedParameter], dp_type: DataParallel) -> Unit:
        return make_unit(weights, dp_type, self._every_micro_batch)


class LastReduced:
    """The units of the module whose gradients a stage reduced last."""

    units: Units = ()


class Chain:
    """The units of a stage's chunk in the order of its forward pass, and the micro-batch of the running backward.

    A module with experts has one unit for them and one for its other matrices. A unit shared by two modules (tied
    embeddings) is in the chain twice. All chunks share `reducing`.
    """

    def __init__(self, units: Sequence[Units], starts_with_embedding: bool, reducing: LastReduced):
        self.units = tuple(units)
        self.last_backward = False
        self._reducing = reducing
        self._first_in_backward = int(starts_with_embedding)  # a lookup needs no weights in backward
        for module in self.units:
            for unit in module:
                unit.deferred |= self.units.count(module) > 1

    def run(self, position: int, module: Any, x: Any, *rest: Any) -> Any:
        """Call `module(x, *rest)` with its unit's weights present, now and in its backward."""
        self.enter(position, position + 1)
        tracked = not x.stop_gradient  # token ids have no gradient: the embedding is reduced at the end of the step
        out = module(_InBackward.apply(x, partial(self.leave_backward, position)) if tracked else x, *rest)
        self._release(position)
        return _InBackward.apply(out, partial(self.enter, position, position - 1)) if tracked else out

    def enter(self, position: int, following: int) -> None:
        """Make a module's weights present, and start fetching those of the one that follows."""
        for unit in self.units[position]:
            unit.gather()
        lowest = 0 if following > position else self._first_in_backward
        if lowest <= following < len(self.units):
            for unit in self.units[following]:
                unit.prefetch()

    def leave_backward(self, position: int) -> None:
        """A module's backward is done: release its weights, and reduce its gradients if due."""
        units = self.units[position]
        self._release(position)
        for earlier in self._reducing.units:
            if earlier.sends_whole or any(unit.every_micro_batch for unit in units):
                earlier.finish_reductions()  # frees its whole message before the next is made
        for unit in units:
            unit.backward_done(self.last_backward)
        self._reducing.units = units

    def _release(self, position: int) -> None:
        for unit in self.units[position]:
            unit.release()


class _InBackward(PyLayer):  # type: ignore[misc]
    """Identity on tokens; calls `event` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, event: Callable[[], None]) -> Any:
        ctx.event = event
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.event()
        return grad
