"""Where the groups of a layer sit in the cluster: how many nodes the worst of them spans, over all stages."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..plan.mesh import Axis, Mesh, Ranks
from ..profiles.network import Place


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
