"""A plan file's prediction of a run, and the log's figures beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..plan import Plan, plan_id

Record = TypeVar("Record", bound=Mapping[str, Any])

WARM_UP_STEPS = 5  # of a process, which no time is taken of: the first ones allocate, compile and connect


@dataclass(frozen=True, slots=True)
class Predicted:
    """The file's `galvatron.predicted`."""

    step_s: float | None
    memory_mib: tuple[float, ...]  # most that tensors of a rank of each stage hold; empty: not predicted
    reserve_mib: float  # of a device, for what tensors do not hold

    @staticmethod
    def of(plan: Plan) -> Predicted:
        fields = plan.metadata.get("predicted") or {}
        stages = fields.get("stages") or []
        reserve = max((stage.get("memory", {}).get("context_mib", 0.0) for stage in stages), default=0.0)
        memory = tuple(_tensors_mib(stage, reserve) for stage in stages if "memory_mib" in stage)
        return Predicted(fields.get("time_s"), memory if len(memory) == plan.pipeline else (), reserve)


def _tensors_mib(stage: Mapping[str, Any], reserve_mib: float) -> float:
    """The estimate; of a file without one the bound."""
    bound: float = stage["memory_mib"] - reserve_mib
    estimate: float | None = stage.get("memory", {}).get("estimate_mib")
    return bound if estimate is None else min(estimate, bound)


def of_plan(plan: Plan, records: Iterable[Record]) -> list[Record]:
    """Those lines of a log that this plan wrote: a run may have gone on under one plan after the other."""
    own = plan_id(plan)
    return [record for record in records if record.get("plan") == own]


def stage_peaks_mib(plan: Plan, records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Most MiB that a rank of each stage held in any of these steps."""
    size = plan.stage_size
    return [
        max(max(record["peak_memory_mib"][stage * size : (stage + 1) * size]) for record in records)
        for stage in range(plan.pipeline)
    ]
