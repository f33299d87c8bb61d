"""Predicted beside measured: what a plan promised and what its training log says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from ..plan import Plan
from .prediction import WARM_UP_STEPS, Predicted, stage_peaks_mib


def predicted_beside_measured(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Table:
    """Step time, and peak memory of each stage, as the plan's file predicts them and as train_log.jsonl has them."""
    predicted = Predicted.of(plan)
    table = Table(box=None, pad_edge=False)
    for column in ("", "predicted", "measured", "predicted / measured"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, guess: float, truth: float, unit: str) -> None:
        table.add_row(name, f"{guess:.4g} {unit}", f"{truth:.4g} {unit}", f"{guess / truth:.2f}")

    if predicted.step_s:
        row("step time", predicted.step_s, median(r["step_time_s"] for r in records[WARM_UP_STEPS:]), "s")
    for stage, (guess, peak) in enumerate(zip(predicted.memory_mib, stage_peaks_mib(plan, records), strict=False)):
        row(f"peak memory, stage {stage}", guess, peak, "MiB")
    return table
