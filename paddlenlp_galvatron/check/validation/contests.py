"""Contests: at a memory budget, the searched plan against the best uniform ones and its nearest runners-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...base.errors import GalvatronError
from ...cost_model import CostModel
from ...plan import ModelShape, Plan
from ...search import SearchOptions, SearchResult, search

UNIFORM, RUNNERS_UP = 10, 5  # rivals of a searched plan
MIB_PER_GB = 1024
UNBOUNDED_GB, NOTHING_GB = 1e6, 1e-6
LEAST, MOST = 0.15, 1.0  # where budgets lie between the least that any plan needs (0) and what the fastest wants (1)


@dataclass(frozen=True)
class Contest:
    """Plans of one budget."""

    budget_mib: float
    searched: Plan
    uniform: tuple[Plan, ...]
    runners_up: tuple[Plan, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.searched, *self.uniform, *self.runners_up)

    @property
    def layer_wise(self) -> bool:
        return len(set(self.searched.layers)) > 1


def contests(shape: ModelShape, cost: CostModel, options: SearchOptions, count: int) -> list[Contest]:
    """One at each of so many budgets, from nearly the least that any plan needs to what the fastest wants."""
    if not count:
        return []

    def find(gb: float, **changed: object) -> SearchResult:
        return search(shape, cost, options.model_copy(update={"memory_constraint": gb, **changed}))

    need, fastest = find(NOTHING_GB).need, find(UNBOUNDED_GB).require()
    if need is None:
        raise GalvatronError(
            "budgets: a plan was found that needs no memory; the memory profile cannot be right: measure it again"
        )
    most_mib = max(stage.memory.total_mib for stage in fastest.prediction.stages)
    shares = [LEAST + (MOST - LEAST) * number / max(count - 1, 1) for number in range(count)]
    return [_contest(need.memory_mib + share * (most_mib - need.memory_mib), find) for share in shares]


def _contest(budget_mib: float, find: Callable[..., SearchResult]) -> Contest:
    result = find(budget_mib / MIB_PER_GB, top_k=1 + RUNNERS_UP)
    uniform = find(budget_mib / MIB_PER_GB, top_k=UNIFORM, fine_grained_mode=False)
    best = result.require().plan
    return Contest(
        budget_mib,
        best,
        _without(best, [one.plan for one in (uniform.best, *uniform.runners_up) if one]),
        _without(best, [one.plan for one in result.runners_up]),
    )


def _without(plan: Plan, others: Sequence[Plan]) -> tuple[Plan, ...]:
    return tuple(dict.fromkeys(other for other in others if other != plan))
