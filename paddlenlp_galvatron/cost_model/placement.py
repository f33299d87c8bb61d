"""Where the groups of a layer sit in the cluster: how many nodes the worst of them spans, over all stages."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan.layout import Grid
from ..profiles.network import Place


class Group(StrEnum):
    """Groups of ranks inside a stage that communicate."""

    TENSOR = "tensor"  # ranks that share samples: tp or Ulysses
    SHARDING = "sharding"  # ranks that hold the same weights: dp, and Ulysses with it
    STAGE = "stage"  # all ranks of the stage
    COPIES = "copies"  # neighbours in a tp group that share a kv head
    TWINS = "twins"  # a rank of the first stage and its peer of the last: tied embeddings


@lru_cache(maxsize=100_000)
def place_of(group: Group, grid: Grid, ulysses: bool, gpus_per_node: int, pipeline: int, copies: int = 1) -> Place:
    """Place of the groups of one kind, as the one among them that spans most nodes. `copies`: ranks that share a
    kv head."""
    if group is Group.STAGE or (group is Group.SHARDING and ulysses):
        members = np.arange(grid.size).reshape(1, -1)
    else:
        rows = np.arange(grid.size).reshape((grid.dp, grid.degree) if grid.consecutive else (grid.degree, grid.dp))
        members = rows if (group is not Group.SHARDING) == grid.consecutive else rows.T
        if group is Group.COPIES:
            members = members.reshape(-1, copies)
    consecutive = members.shape[1] == 1 or bool(members[0, 1] - members[0, 0] == 1)
    offsets = {stage * grid.size % gpus_per_node for stage in range(pipeline)}
    return Place(members.shape[1], max(_nodes(members + offset, gpus_per_node) for offset in offsets), consecutive)


def _nodes(members: NDArray[np.int_], gpus_per_node: int) -> int:
    """Most nodes that a row (ranks rising) spans."""
    nodes = members // gpus_per_node
    return int((np.diff(nodes, axis=1) != 0).sum(axis=1).max(initial=0)) + 1
