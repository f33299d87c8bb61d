"""Work and results of a validation's ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from ...plan import ModelShape, Plan, plan_from_dict, plan_to_dict

FILE, JOURNAL = "work.json", "validate"
# Quantile of a plan's step times that counts: the third of 15. Other work of a host makes steps longer, never shorter:
# on two shared processors the median of a plan's steps moved by 6.9 % about its prediction, this one by 5 %.
QUICK = 0.14


def key_of(plan: Plan) -> str:
    """Identity of a plan, without its metadata."""
    text = json.dumps(plan_to_dict(replace(plan, metadata={})), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Work(BaseModel):
    """The file that the ranks read."""

    model_config = ConfigDict(frozen=True)

    output: Path  # folder of the journal
    shape: ModelShape
    plans: tuple[dict[str, Any], ...]
    identity: dict[str, Any] = {}  # of the journal: all that changes a measurement
    visits: int = 1
    steps: int  # of a visit
    seed: int = 0
    seconds: float  # after which no further plan is begun
    ranks_per_node: int
    adapter_rank: int | None = None  # of adapters, which alone learn

    def read_plans(self) -> list[Plan]:
        return [plan_from_dict(fields) for fields in self.plans]


def visit_of(plan: Plan, number: int) -> str:
    """A visit's name in the journal."""
    return f"{key_of(plan)} {number}"


class Step(BaseModel):
    """One timed step, and the traced one behind it."""

    seconds: float  # of the slowest rank
    terms_ms: tuple[dict[str, float], ...]  # of each rank, traced


class Visit(BaseModel):
    """A plan's steps that were run in a row."""

    steps: tuple[Step, ...] = ()
    peaks_mib: tuple[float, ...] = ()  # of each rank: most that tensors held, beyond those that the process held before
    reserved_mib: tuple[float, ...] = ()  # of each rank: most that the allocator held
    beside_mib: tuple[float, ...] = ()  # of each rank: taken on its GPU outside the allocator; empty: not known
    communicators: int = 0  # of the rank that has most, the world's among them
    bytes: dict[str, int] = {}  # given to collectives in a step, over all ranks
    failed: str = ""  # why it did not run


class MeasuredRun(BaseModel):
    """Measurements of a plan over all visits."""

    step: Step  # the one that counts
    peaks_mib: tuple[float, ...]
    bytes: dict[str, int]
    quickest_s: tuple[float, ...]  # step of each visit

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> Self:
        """The run of visits none of which failed."""
        steps = sorted((step for visit in visits for step in visit.steps), key=lambda step: step.seconds)
        step = steps[round(QUICK * (len(steps) - 1))]
        peaks = tuple(map(max, zip(*(visit.peaks_mib for visit in visits), strict=True)))
        quickest = tuple(min(step.seconds for step in visit.steps) for visit in visits)
        return cls(step=step, peaks_mib=peaks, bytes=visits[0].bytes, quickest_s=quickest)
