"""What a search answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from ..cost_model import Prediction
from ..plan import Infeasible, Plan
from .space import Family


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it takes."""

    plan: Plan
    prediction: Prediction

    @property
    def time_s(self) -> float:
        return self.prediction.time_s

    @property
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory in which some plan fits, and what binds there."""

    plan: Plan
    prediction: Prediction

    @property
    def stage(self) -> int:
        """The stage that needs most."""
        totals = [stage.memory.total_mib for stage in self.prediction.stages]
        return totals.index(max(totals))

    @property
    def memory_mib(self) -> float:
        """Of a device, the reserve included."""
        return self.prediction.stages[self.stage].memory.total_mib

    def __str__(self) -> str:
        memory, layers = self.prediction.stages[self.stage].memory, self.plan.stage_layers(self.stage)
        terms = {
            "model states": memory.states_mib,
            "activations": memory.activations_mib,
            "working memory": memory.working_mib,
            "the reserve": memory.context_mib,
        }
        term = max(terms, key=lambda name: terms[name])
        return (
            f"{self.memory_mib / 1024:.3f} GB a device would do; stage {self.stage} (layers {layers.start}-"
            f"{layers.stop - 1}) of the plan that needs least binds: {term} take {terms[term] / 1024:.3f} GB of it"
        )


class Outcome(IntEnum):
    """What became of a family of plans; of a family searched in parts, the highest."""

    NOT_DIVISIBLE = 0  # no strategy splits batch, heads and ranks evenly
    OUT_OF_MEMORY = 1
    OUT_OF_BOUND = 2  # no plan of it can beat, or none beats, what was found before
    SOLVED = 3  # searched to the end
    GIVEN_UP = 4  # left with a gap: the effort was not enough, or prices of switching break the triangle inequality


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan with its certificate, or the memory that one would need."""

    best: Candidate | None
    lower_bound_s: float  # no plan of the best one's batch takes less, nor one of another batch less per sample
    search_time_s: float
    outcomes: Mapping[Family, Outcome]
    runners_up: tuple[Candidate, ...] = ()  # the best of other families, if top_k asks for them
    need: Need | None = None  # where nothing fits

    @property
    def plan(self) -> Plan:
        """The best plan. Raises Infeasible."""
        return self.require().plan

    @property
    def time_s(self) -> float:
        """Predicted time of one step; infinite where nothing fits."""
        return self.best.time_s if self.best else inf

    @property
    def gap(self) -> float:
        """How far below the best plan's time the optimum may lie, as a fraction; 0: it is the optimum."""
        return max(0.0, 1 - self.lower_bound_s / self.best.time_s) if self.best else 0.0

    def require(self) -> Candidate:
        """The best plan. Raises Infeasible, which tells the least memory that would do."""
        if self.best is None:
            raise Infeasible(f"no plan fits: {self.need or 'no strategy splits batch, heads and ranks evenly'}")
        return self.best
