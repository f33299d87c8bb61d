"""Times of a module's collectives, and their parts that compute does not hide."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..plan.mesh import Axis, Mesh, Ranks
from ..profiles.network import Network, Place
from .communication import COPIES, TWINS, Call, Calls

MIB = 2**20


@lru_cache(maxsize=100_000)
def place_of(axes: tuple[Axis, ...], mesh: Mesh, gpus_per_node: int, pipeline: int) -> Place:
    """Place of the groups along these axes of a stage, as the one among them that spans most nodes."""
    members = mesh.groups(*axes)
    consecutive = members.shape[1] == 1 or bool(members[0, 1] - members[0, 0] == 1)
    offsets = {stage * mesh.size % gpus_per_node for stage in range(pipeline)}
    return Place(members.shape[1], max(_nodes(members + offset, gpus_per_node) for offset in offsets), consecutive)


def _nodes(members: Ranks, gpus_per_node: int) -> int:
    """Most nodes that a row (ranks rising) spans."""
    nodes = members // gpus_per_node
    return int((np.diff(nodes, axis=1) != 0).sum(axis=1).max(initial=0)) + 1


class Beside(NamedTuple):
    """Messages that run beside compute, in ms."""

    ms: float = 0.0  # one after the other
    overlap_ms: float = 0.0  # the same, each times its overlap coefficient

    def also(self, other: Beside) -> Beside:
        """These and the other's."""
        return Beside(self.ms + other.ms, self.overlap_ms + other.overlap_ms)

    def with_compute(self, compute_ms: float) -> float:
        """Both started together: while both run each is slower by the messages' overlap coefficients, in the mean over
        their time. Never worse than in turn."""
        if compute_ms == 0 or self.ms == 0:
            return compute_ms + self.ms
        longer, shorter = max(compute_ms, self.ms), min(compute_ms, self.ms)
        return longer + min(self.overlap_ms / self.ms - 1, 1.0) * shorter


class Messages(NamedTuple):
    """The times of `Calls`, in ms."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    gather_forward: Beside = Beside()
    gather_backward: Beside = Beside()
    reduce: Beside = Beside()
    finish_ms: float = 0.0  # those of vectors included
    publish_ms: float = 0.0

    def behind(self, points: Messages) -> Messages:
        """Those of weights, with those at the communication points of the same layer."""
        return Messages(points.forward_ms, points.backward_ms, *self[2:])

    @property
    def frozen(self) -> Messages:
        """Messages of a module whose weights do not learn."""
        return Messages(self.forward_ms, self.backward_ms, self.gather_forward, self.gather_backward)


class MessageTimes:
    """Times of collectives on one cluster."""

    def __init__(self, network: Network, gpus_per_node: int):
        self._network = network
        self._gpus_per_node = gpus_per_node

    def of(self, calls: Calls, mesh: Mesh, pipeline: int, copies: int) -> Messages:
        """`copies`: ranks of a tp group that hold the same kv heads."""

        def total_ms(some: tuple[Call, ...], joined: bool = False) -> float:
            return sum([self._ms(call, mesh, pipeline, copies, joined) for call in some]) if some else 0.0

        def beside(some: tuple[Call, ...]) -> Beside:
            if not some:
                return Beside()
            overlap_of = self._network.profile.overlap_of
            each = [(self._ms(call, mesh, pipeline, copies), overlap_of(call.kind)) for call in some]
            return Beside(sum([ms for ms, _ in each]), sum([ms * overlap for ms, overlap in each]))

        return Messages(
            total_ms(calls.forward),
            total_ms(calls.backward),
            beside(calls.gather_forward),
            beside(calls.gather_backward),
            beside(calls.reduce),
            total_ms(calls.finish) + total_ms(calls.vectors, joined=True),
            total_ms(calls.publish),
        )

    def _ms(self, call: Call, mesh: Mesh, pipeline: int, copies: int, joined: bool = False) -> float:
        if call.axes == TWINS:  # two ranks send each other the whole at the same time
            return self._network.send_ms(pipeline, call.bytes / MIB)
        if call.axes == COPIES:
            mesh = mesh.sharing(copies)
        place = place_of(call.axes, mesh, self._gpus_per_node, pipeline)
        return call.times * self._network.collective_ms(call.kind, place, call.bytes / MIB, joined)
