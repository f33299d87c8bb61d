"""The cost of one module on the rank that has most of it: its passes, messages and weights put together."""

from __future__ import annotations

from ..plan.mesh import Mesh
from ..plan.strategy import Assumptions, DataParallel, LayerStrategy, Strategy
from ..profiles.computation import PassTimes
from ..profiles.network import Network
from .communication import Calls
from .costs import LayerCost, States, Task, Terms, Workspace
from .messages import Messages, MessageTimes
from .module_memory import Room, module_memory
from .peak import PartMemory
from .task import frozen_states
from .weights import StateBytes, Weights


class ModuleCosts:
    """Costs of modules of one model on one cluster, under one task."""

    def __init__(
        self,
        network: Network,
        gpus_per_node: int,
        optimizer_ms_per_million: float,
        assumed: Assumptions,
        state_bytes: StateBytes,
        task: Task,
        host_mib_per_ms: float | None,
    ):
        """`host_mib_per_ms`: to and from the host's memory, where the optimizer's states lie there; else None."""
        self._times = MessageTimes(network, gpus_per_node)
        self._optimizer_ms_per_million = optimizer_ms_per_million
        self._assumed = assumed
        self._state_bytes = state_bytes
        self._task = task
        self._host_mib_per_ms = host_mib_per_ms

    def messages(self, calls: Calls, mesh: Mesh, pipeline: int, weights: Weights) -> Messages:
        """How long a module's collectives take."""
        return self._times.of(calls, mesh, pipeline, weights.copies)

    def trained(
        self,
        strategy: Strategy,
        sharding: int,
        messages: Messages,
        times: PassTimes,
        weights: Weights,
        several: bool,
        room: Room,
    ) -> LayerCost:
        """Cost of a module's own weights as the task has it: learning or frozen. `sharding`: ranks that share its
        weights."""
        if not self._task.frozen:
            return self.own(strategy, sharding, messages, times, weights, several, room)
        states = frozen_states(self._state_bytes)
        return self.own(strategy, sharding, messages.frozen, times, weights, several, room, states)

    def own(
        self,
        strategy: Strategy,
        sharding: int,
        messages: Messages,
        times: PassTimes,
        weights: Weights,
        several: bool,
        room: Room,
        states: StateBytes | None = None,
    ) -> LayerCost:
        """`times`: with the recompute that the strategy has. `several`: micro-batches. `states`: bytes of a weight,
        where they are not those of weights that learn."""
        per_weight = states or self._state_bytes
        again_ms = times.recompute_ms or 0.0
        compute_ms = times.backward_ms + again_ms
        gathers, reductions = messages.gather_backward, messages.reduce
        forward = messages.gather_forward.with_compute(times.forward_ms)
        backward = gathers.with_compute(compute_ms)
        reduce_ms = gathers.also(reductions).with_compute(compute_ms) - backward
        shown_ms = forward - times.forward_ms, backward - compute_ms
        sharded = strategy.dp_type is not DataParallel.DDP and sharding > 1
        updated = (weights.matrices / (sharding if sharded else 1) + weights.vectors) if per_weight.optimizer else 0.0
        held, workspace, memory = self.memory(strategy, sharding, weights, several, room, states)
        optimizer_ms = updated / 1e6 * self._optimizer_ms_per_million
        if self._host_mib_per_ms:  # there and back, one matrix after the other, with nothing beside it
            optimizer_ms += 2 * memory.update.states_mib / self._host_mib_per_ms
        terms = Terms(
            held,
            times.forward_ms,
            times.backward_ms,
            again_ms,
            messages.forward_ms,
            messages.backward_ms,
            *shown_ms,
            messages.gather_forward.ms + gathers.ms - sum(shown_ms),
            reduce_ms,
            reductions.ms - reduce_ms,
            not self._assumed.async_grad_reduce,
            messages.finish_ms,
            messages.publish_ms,
            optimizer_ms,
        )
        return LayerCost.of(terms, room.activation_mib, workspace, memory)

    def memory(
        self,
        strategy: Strategy,
        sharding: int,
        weights: Weights,
        several: bool,
        room: Room,
        states: StateBytes | None = None,
    ) -> tuple[States, Workspace, PartMemory]:
        """The memory alone of a module's own weights."""
        return module_memory(
            weights,
            states or self._state_bytes,
            strategy.dp_type,
            sharding,
            several,
            self._assumed.async_grad_reduce,
            room,
            several_matrices=isinstance(strategy, LayerStrategy),
            offload=self._host_mib_per_ms is not None,
        )
