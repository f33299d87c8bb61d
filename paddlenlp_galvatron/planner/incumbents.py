"""The best plans found so far, and the proof about all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ..base.units import MS_PER_S
from .result import Candidate, FamilyOutcome
from .space import PlanFamily


@dataclass
class Incumbents:
    """The fastest plan of each family that has one, and what is proven of the families without. Times per sample."""

    top_k: int  # families whose plans are wanted
    most_ms: float = inf  # of the plans that are wanted
    found: dict[PlanFamily, Candidate] = field(default_factory=dict)
    outcomes: dict[PlanFamily, FamilyOutcome] = field(default_factory=dict)
    bounds_s: dict[PlanFamily, float] = field(default_factory=dict)  # of steps, for families that cannot win
    unproven_ms: float = inf  # least lower bound of the families that were given up

    @property
    def ranked(self) -> list[Candidate]:
        """The fastest plans, one a family."""
        return sorted(self.found.values(), key=lambda one: one.ms_per_sample)[: self.top_k]

    def offer(self, candidate: Candidate, family: PlanFamily) -> None:
        """Keep a plan that is faster than its family's best."""
        known = self.found.get(family)
        if known is None or candidate.samples_per_s > known.samples_per_s:
            self.found[family] = candidate

    def limit_ms(self, family: PlanFamily) -> float:
        """The time that a plan of the family must beat to be among the top_k families."""
        others = sorted(one.ms_per_sample for other, one in self.found.items() if other != family)
        limit = others[self.top_k - 1] if len(others) >= self.top_k else self.most_ms
        mine = self.found.get(family)
        return min(limit, mine.ms_per_sample) if mine else limit

    def note(self, family: PlanFamily, outcome: FamilyOutcome) -> None:
        """Keep the most that is known of how a family ended."""
        self.outcomes[family] = max(self.outcomes.get(family, outcome), outcome)

    def reject(self, family: PlanFamily, step_ms: float) -> None:
        """Leave out a family whose steps take at least so long: others are no slower."""
        self.note(family, FamilyOutcome.OUT_OF_BOUND)
        self.bounds_s[family] = min(self.bounds_s.get(family, inf), step_ms / MS_PER_S)

    def give_up(self, family: PlanFamily, bound_ms: float) -> None:
        """Leave a family unsolved: its bound limits what is proven."""
        if bound_ms >= self.limit_ms(family):
            self.reject(family, bound_ms * family.global_batch)
        else:
            self.unproven_ms = min(self.unproven_ms, bound_ms)
            self.note(family, FamilyOutcome.GIVEN_UP)
