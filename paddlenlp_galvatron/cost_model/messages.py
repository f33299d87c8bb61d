"""What a module's collectives take, and what is left of it beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan.mesh import Mesh
from ..plan.seams import Collective
from ..profiles.network import Network
from .communication import COPIES, TWINS, Call, Calls
from .placement import place_of

MIB = 2**20

Timed = tuple[float, Collective]  # ms


class Messages(NamedTuple):
    """The times of `Calls`, in ms: one by one where they run beside compute."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    gather_forward: tuple[Timed, ...] = ()
    gather_backward: tuple[Timed, ...] = ()
    reduce: tuple[Timed, ...] = ()
    finish_ms: float = 0.0  # those of vectors included
    publish_ms: float = 0.0

    @property
    def frozen(self) -> Messages:
        """Of a module whose weights do not learn."""
        return Messages(self.forward_ms, self.backward_ms, self.gather_forward, self.gather_backward)


class MessageTimes:
    """Times of collectives on one cluster."""

    def __init__(self, network: Network, gpus_per_node: int):
        self._network = network
        self._gpus_per_node = gpus_per_node

    def of(self, calls: Calls, mesh: Mesh, pipeline: int, copies: int) -> Messages:
        """`copies`: ranks of a tp group that hold the same kv heads."""

        def each(some: tuple[Call, ...], joined: bool = False) -> tuple[Timed, ...]:
            return tuple([(self._ms(call, mesh, pipeline, copies, joined), call.kind) for call in some]) if some else ()

        return Messages(
            total_ms(each(calls.forward)),
            total_ms(each(calls.backward)),
            each(calls.gather_forward),
            each(calls.gather_backward),
            each(calls.reduce),
            total_ms(each(calls.finish)) + total_ms(each(calls.vectors, joined=True)),
            total_ms(each(calls.publish)),
        )

    def beside(self, compute_ms: float, messages: Sequence[Timed]) -> float:
        """Work and messages started together: while both run each is slower by the messages' overlap coefficients, in
        the mean over their time. Never worse than in turn."""
        messages_ms = total_ms(messages)
        if compute_ms == 0 or messages_ms == 0:
            return compute_ms + messages_ms
        longer, shorter = max(compute_ms, messages_ms), min(compute_ms, messages_ms)
        overlap = sum(ms * self._network.profile.overlap_of(kind) for ms, kind in messages) / messages_ms
        return longer + min(overlap - 1, 1.0) * shorter

    def _ms(self, call: Call, mesh: Mesh, pipeline: int, copies: int, joined: bool) -> float:
        if call.axes == TWINS:  # two ranks send each other the whole at the same time
            return self._network.send_ms(pipeline, call.bytes / MIB)
        if call.axes == COPIES:
            mesh = mesh.sharing(copies)
        place = place_of(call.axes, mesh, self._gpus_per_node, pipeline)
        return call.times * self._network.collective_ms(call.kind, place, call.bytes / MIB, joined)


def total_ms(messages: Sequence[Timed]) -> float:
    """One after the other."""
    return sum([ms for ms, _ in messages]) if messages else 0.0  # most have none; asked for with every price
