"""Predicted beside measured: what a plan promised and what its training log says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from ..plan import Plan

WARM_UP_STEPS = 5  # left out of the measured step time


def predicted_beside_measured(plan: Plan, records: Sequence[dict[str, Any]]) -> Table:
    """Step time, and peak memory of each stage, as the plan's file predicts them and as train_log.jsonl has them."""
    predicted = plan.metadata["predicted"]
    table = Table(box=None, pad_edge=False)
    for column in ("", "predicted", "measured", "predicted / measured"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, guess: float, truth: float, unit: str) -> None:
        table.add_row(name, f"{guess:.4g} {unit}", f"{truth:.4g} {unit}", f"{guess / truth:.2f}")

    row("step time", predicted["time_s"], median(r["step_time_s"] for r in records[WARM_UP_STEPS:]), "s")
    for stage, guess in enumerate(predicted["stages"]):
        ranks = slice(stage * plan.stage_size, (stage + 1) * plan.stage_size)
        peak = max(max(record["peak_memory_mib"][ranks]) for record in records)
        row(f"peak memory, stage {stage}", guess["memory_mib"], peak, "MiB")
    return table
