"""Tensor parallelism at the communication points: plain, and Megatron-SP, whose tokens are sharded between layers."""

from __future__ import annotations

from typing import Any

from ...plan.comm_points import Op
from ..collectives import all_gather, all_reduce, reduce_scatter


def _sum(x: Any, group: Any) -> Any:
    return all_reduce(x.clone(), group)


OPS = {
    Op.GATHER: (all_gather, reduce_scatter),
    Op.SCATTER: (reduce_scatter, all_gather),
    Op.REPLICATE: (None, _sum),
    Op.REDUCE: (_sum, None),
}
