"""The prediction that a plan's file holds: time, memory, and the load of experts that both were priced with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .strategy import Plan


class Load(NamedTuple):
    """The load of experts that prices assume: rows of the rank that gets most over the mean, by names of options."""

    moe_imbalance: float  # in times and the estimate of memory
    moe_imbalance_bound: float  # in the bound of memory

    def __str__(self) -> str:
        usual, most = self
        return f"rows of the fullest rank of experts {usual:g} x the mean, {most:g} x in the bound of memory"


def load_summary(load: Load | None) -> dict[str, float] | None:
    """`load` of every JSON answer; None: a model without experts, or a plan whose file does not tell it."""
    return load and load._asdict()


@dataclass(frozen=True, slots=True)
class Predicted:
    """The file's `galvatron.predicted`."""

    step_s: float | None
    memory_mib: tuple[float, ...]  # most that tensors of a rank of each stage hold; empty: not predicted
    reserve_mib: float  # of a device, for what tensors do not hold
    load: Load | None  # of experts; None: the file tells none

    @staticmethod
    def of(plan: Plan) -> Predicted:
        fields = plan.metadata.get("predicted") or {}
        stages = fields.get("stages") or []
        reserve = max((stage.get("memory", {}).get("context_mib", 0.0) for stage in stages), default=0.0)
        memory = tuple(_tensors_mib(stage) for stage in stages if "memory_mib" in stage)
        options = (plan.metadata.get("searched_from") or {}).get("options")
        options = options if isinstance(options, dict) else {}
        load = [one for name in Load._fields if isinstance(one := options.get(name), int | float) and one >= 1]
        planned = Load(*load) if len(load) == len(Load._fields) else None
        return Predicted(fields.get("time_s"), memory if len(memory) == plan.pipeline else (), reserve, planned)


def _tensors_mib(stage: Mapping[str, Any]) -> float:
    """The estimate; of a file without one the bound."""
    memory = stage.get("memory", {})
    bound: float = stage["memory_mib"] - memory.get("context_mib", 0.0)
    estimate: float | None = memory.get("estimate_mib")
    return bound if estimate is None else min(estimate, bound)
