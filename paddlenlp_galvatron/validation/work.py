"""What the ranks of a validation are told to run, and what they tell of each plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..plan import ModelShape, Plan, plan_from_dict, plan_to_dict

FILE, JOURNAL = "work.json", "validate"


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
    steps: int
    seed: int
    seconds: float  # after which no further plan is begun
    ranks_per_node: int

    def read_plans(self) -> list[Plan]:
        return [plan_from_dict(fields) for fields in self.plans]


class RankRun(BaseModel):
    """One rank in the step that counts."""

    terms_ms: dict[str, float]
    peak_mib: float  # most that tensors held in any step, beyond what the process held before


class MeasuredRun(BaseModel):
    """What a plan took."""

    step_s: float = 0.0  # the one that counts, of the slowest rank
    layer_ms: float = 0.0  # forward and backward of a layer with one sample, right before and behind that step
    ranks: tuple[RankRun, ...] = ()
    bytes: dict[str, int] = {}  # that a step gives to collectives, over all ranks
    failed: str = ""  # why it did not run
