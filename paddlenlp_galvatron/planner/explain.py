"""Explains a plan by searches: the runners-up, the best ones under changes and under other budgets."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..base.errors import GalvatronError, Infeasible
from ..cost_model.facts import PlanFacts
from ..plan import Plan
from .problem import Problem, SharedTime
from .result import Candidate, SearchResult
from .what_ifs import MOST_CHANGES, OneLayerChanged, WhatIf, one_layer_changed, what_ifs

SAME = 1e-6  # share of a step by which two times differ in rounding alone
SEARCHES_S = 15.0  # time that all searches share; in usual spaces they take a few seconds
FIRST = 4  # shares of the first search, whose plans the others begin with
RUNNERS_UP = 4  # plans of other families that are shown after the best one
FRONTIER_S = 8.0  # time that its searches share
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the plan's, at which the frontier is searched


@dataclass(frozen=True, kw_only=True)
class Explanation(PlanFacts):
    """The facts of a plan, the runners-up, and what would change it."""

    problem: Problem
    searched: SearchResult  # the best plans of this batch, the plan's family among them
    one_layer: OneLayerChanged
    what_ifs: list[WhatIf]

    @property
    def faster(self) -> Candidate | None:
        """The best plan of this batch, where it is not this one."""
        best = self.searched.best
        return best if best and best.time_s < self.prediction.time_s / (1 + SAME) else None

    @property
    def is_searched(self) -> bool:
        """Whether a search wrote the plan."""
        predicted = self.plan.metadata.get("predicted")
        return isinstance(predicted, dict) and "lower_bound_s" in predicted

    @property
    def is_simplest(self) -> bool:
        """Whether no plan within the tolerance that was found has fewer strategies, or as many in fewer segments."""
        mine, best, fastest = Candidate(self.plan, self.prediction), self.searched.best, self.searched.fastest
        if not best or not fastest:
            return False
        most_s = fastest.time_s * (1 + self.problem.options.simplest_within / 100)
        return mine.time_s <= most_s and (mine.strategies, mine.segments) <= (best.strategies, best.segments)


def explain(plan: Plan, problem: Problem) -> Explanation:
    """Explain a plan by a dozen searches. Raises UserError where the plan cannot be priced."""
    one_layer = one_layer_changed(problem, plan)
    time = SharedTime(min(SEARCHES_S, problem.options.time_limit or SEARCHES_S), FIRST + MOST_CHANGES)
    searched = problem.search(known=[plan], seconds=time.take(FIRST), compared=True, top_k=RUNNERS_UP)
    best = [one.plan for one in (searched.best, searched.fastest) if one]
    known = [plan, *best, *(other.plan for other in searched.runners_up)]
    return Explanation(
        **vars(problem.facts_of(plan)),
        problem=problem,
        searched=searched,
        one_layer=one_layer,
        what_ifs=list(what_ifs(problem, plan, known, time)),
    )


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget, and the best step time under it."""

    memory_gb: float
    time_s: float | None  # None: no plan was found
    least_s: float  # no plan takes less; infinite: none fits

    @property
    def is_uncertain(self) -> bool:
        """Whether a faster plan may exist: the search was not taken to its end."""
        return self.time_s is not None and self.least_s < self.time_s * (1 - SAME)


def frontier(explanation: Explanation) -> list[FrontierPoint]:
    """The best step time of the plan's batch under budgets around the plan's, each found by a search that begins with
    the results of those before it."""
    problem, points = explanation.problem, []
    known = [explanation.plan, *(one.plan for one in explanation.what_ifs if one.plan)]
    time = SharedTime(FRONTIER_S, len(BUDGETS))
    for share in BUDGETS:
        memory_gb = problem.options.memory_gib * share
        try:
            result = problem.search(known=known, seconds=time.take(), memory_constraint=memory_gb)
            known.append(result.plan)
            points.append(FrontierPoint(memory_gb, result.time_s, result.lower_bound_s))
        except GalvatronError as error:
            points.append(FrontierPoint(memory_gb, None, inf if isinstance(error, Infeasible) else 0.0))
    return points
