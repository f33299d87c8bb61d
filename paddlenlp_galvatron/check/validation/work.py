"""What the ranks of a validation are told to run, and what they tell of each plan."""

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
# Of a plan's steps, from the quickest, which one counts: of 15 the third. What else a host does makes steps longer,
# never shorter: of one plan's steps on two shared processors the median moved by 6.9 % about its prediction, this one
# by 5 %.
QUICK = 0.14


def key_of(plan: Plan) -> str:
    """Tells a plan from all others, whatever its file says beside it."""
    text = json.dumps(plan_to_dict(replace(plan, metadata={})), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Work(BaseModel):
    """Goes to the ranks as a file."""

    model_config = ConfigDict(frozen=True)

    output: Path  # folder of the journal
    shape: ModelShape
    plans: tuple[dict[str, Any], ...]
    identity: dict[str, Any]  # of the journal: all that changes what is measured
    visits: int
    steps: int  # of a visit
    seed: int
    seconds: float  # after which no further plan is begun
    ranks_per_node: int
    adapter_rank: int | None = None  # of adapters, which alone learn

    def read_plans(self) -> list[Plan]:
        return [plan_from_dict(fields) for fields in self.plans]


def visit_of(plan: Plan, number: int) -> str:
    """Its name in the journal."""
    return f"{key_of(plan)} {number}"


class Step(BaseModel):
    """One timed step, and the traced one behind it."""

    seconds: float  # of the slowest rank
    terms_ms: tuple[dict[str, float], ...]  # of each rank, traced


class Visit(BaseModel):
    """A plan's steps that were run in a row."""

    steps: tuple[Step, ...] = ()
    layer_ms: float = 0.0  # forward and backward of a layer with one sample, before and after these steps
    peaks_mib: tuple[float, ...] = ()  # of each rank: most that tensors held, beyond what the process held before
    bytes: dict[str, int] = {}  # that a step gives to collectives, over all ranks
    failed: str = ""  # why it did not run


class MeasuredRun(BaseModel):
    """What a plan took, in all of its visits."""

    step: Step  # the one that counts
    layer_ms: float  # of the visit of that step
    peaks_mib: tuple[float, ...]
    bytes: dict[str, int]
    quickest_s: tuple[float, ...]  # step of each visit

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> Self:
        """Of visits none of which failed."""
        steps = sorted(((step, visit) for visit in visits for step in visit.steps), key=lambda one: one[0].seconds)
        step, during = steps[round(QUICK * (len(steps) - 1))]
        peaks = tuple(map(max, zip(*(visit.peaks_mib for visit in visits), strict=True)))
        quickest = tuple(min(step.seconds for step in visit.steps) for visit in visits)
        return cls(step=step, layer_ms=during.layer_ms, peaks_mib=peaks, bytes=visits[0].bytes, quickest_s=quickest)
