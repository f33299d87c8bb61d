"""Bytes that a step sends: the cost model's count beside the runtime's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..cost_model import step_traffic_bytes
from ..plan import ModelShape, Plan

MIB = 2**20
SCALARS = 2  # loss and gradient norm: an fp32 number each on every rank, which the cost model leaves out
SCALAR_BYTES = 4


def traffic_table(plan: Plan, shape: ModelShape, counted: Mapping[str, Any], adapter_rank: int | None = None) -> Table:
    """`counted`: a run's traffic.json; `adapter_rank`: of adapters that learnt alone. MiB over all ranks, by kind."""
    predicted = step_traffic_bytes(plan, shape, adapter_rank)
    if plan.world_size > 1:
        predicted["all_reduce"] = predicted.get("all_reduce", 0) + SCALARS * SCALAR_BYTES * plan.world_size
    groups = max(counted["groups"], default=0)
    table = Table(box=None, pad_edge=False, title=f"messages of a step, all ranks; at most {groups} groups on a rank")
    table.title_justify = "left"
    for column in ("", "calls", "predicted MiB", "counted MiB"):
        table.add_column(column, justify="right" if column else "left")
    for kind, size in counted["bytes"].items():
        if size or predicted.get(kind):
            guess, calls = predicted.get(kind, 0) / MIB, counted["calls"][kind]
            table.add_row(kind.replace("_", "-"), str(calls), f"{guess:.3f}", f"{size / MIB:.3f}")
    return table
