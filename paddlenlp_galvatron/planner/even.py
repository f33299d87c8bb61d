"""Plans that another program's trainer can run: one strategy for all layers and the vocabulary, and even stages.

Only how many layers of a stage recompute is then left to choose. A layer that recomputes makes the step no shorter, and
takes less memory whichever layer of the stage it is, so that the fewest that fit in each stage are the best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from galvatron_dp_core import Cancel

from ..cost_model import CostModel
from ..model import Recompute
from ..plan import LayerStrategy, ModelShape, Plan, VocabStrategy
from ..plan.check import find_faults
from ..plan.export import FLEET, FORMERS, STOCK, gaps
from ..plan.uniform import even_stages
from .space import PlanFamily, Strategies

PROGRAMS = {"paddlenlp": STOCK, "paddlefleet": FLEET, "paddleformers": FORMERS}
Chosen = tuple[float, float, int, Sequence[int], Sequence[int]]  # as the core's `solve` answers


@dataclass(frozen=True)
class EvenPlans:
    """Plans of a model that another program can run."""

    program: str  # of PROGRAMS
    model: ModelShape
    cost: CostModel
    budget_mib: float  # without the reserve
    bare: Plan  # the same for all plans of a search

    def expressible(self, plan: Plan) -> bool:
        return not gaps(plan, PROGRAMS[self.program], self.model)

    def plans(self, family: PlanFamily, strategies: Strategies) -> Iterator[Plan]:
        """Plans with no layer that recomputes, one in each stage, and all of them; none where stages cannot be even."""
        if self.model.layers % family.stages:
            return
        each = self.model.layers // family.stages
        for count in sorted({0, 1, each} if len(strategies.layers[0]) > 1 else {0}):
            plan = self.plan(family, strategies, [count] * family.stages)
            if not find_faults(plan, self.model):
                yield plan

    def plan(self, family: PlanFamily, strategies: Strategies, counts: Sequence[int]) -> Plan:
        """The plan in which the first `counts` layers of each stage recompute."""
        division, choice = self.choice(counts)
        return strategies.plan(family, 0, division, choice, self.bare)

    def choice(self, counts: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        """Layers of each stage, and the number of each layer's strategy."""
        division = even_stages(self.model.layers, len(counts))
        return division, [int(at < count) for each, count in zip(division, counts, strict=True) for at in range(each)]

    def spaces(
        self, layers: Sequence[LayerStrategy], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Every strategy that all layers can have, and where some of them recompute, the same that does."""
        found = []
        for layer in layers:
            if layer.recompute:
                continue
            alike = [one for one in layers if replace(one, recompute=Recompute.NONE) == layer and one.recompute]
            like = layer.axes, layer.dp_type, layer.sharding
            vocab = [one for one in vocabularies if (one.axes, one.dp_type, one.sharding) == like]
            for choices in [[layer, one] for one in alike] or [[layer]]:
                one = Strategies([choices], vocab)
                if vocab and any(self.expressible(made) for made in self.plans(family, one)):
                    found.append(one)
        return found

    def core(self, family: PlanFamily, strategies: Strategies) -> EvenCore:
        return EvenCore(family, strategies, self)


class EvenCore:
    """Replaces the core's object of a family; times in ms, as the core has them."""

    def __init__(self, family: PlanFamily, strategies: Strategies, even: EvenPlans):
        self._family, self._strategies, self._even = family, strategies, even

    def bound(self, cancel: Cancel) -> float:
        return 0.0 if self._best else inf

    def tight_bound(self, limit_ms: float, cancel: Cancel) -> float:
        return 0.0

    def solve(self, limit_ms: float, effort: int, cancel: Cancel, gap: float) -> Chosen:
        counts = self._best
        if counts is None:
            return inf, inf, 0, (), ()
        time_ms = 1000 * self._even.cost.predict(self._even.plan(self._family, self._strategies, counts)).time_s
        return time_ms, time_ms, 0, *self._even.choice(counts)

    def least_memory(self, cancel: Cancel) -> tuple[float, int, Sequence[int], Sequence[int]]:
        plans = [plan for plan in self._even.plans(self._family, self._strategies) if self._even.expressible(plan)]
        if not plans:  # as under gpipe
            return inf, 0, (), ()
        least = min(plans, key=self._mib)
        return self._mib(least), 0, least.stages, [int(bool(layer.recompute)) for layer in least.layers]

    @cached_property
    def _best(self) -> list[int] | None:
        """Layers that recompute in each stage of the fastest plan that fits; None: none fits. Where the program has as
        many in each stage, the fewest that fit in all; where it has all or none, all."""
        stages = self._family.stages
        each = self._even.model.layers // stages if len(self._strategies.layers[0]) > 1 else 0
        fits = [self._fits(stage) for stage in range(stages)]
        own = [fewest(one, each) for one in fits]
        alike = None if None in own else fewest(lambda count: all(one(count) for one in fits), each)
        for tried in (own, [alike] * stages, [each] * stages):
            counts = [count for count in tried if count is not None]
            if len(counts) == stages:
                plan = self._even.plan(self._family, self._strategies, counts)
                if self._even.expressible(plan) and self._mib(plan) <= self._even.budget_mib:
                    return counts
        return None

    def _fits(self, stage: int) -> Callable[[int], bool]:
        def fits(count: int) -> bool:
            plan = self._even.plan(self._family, self._strategies, [count] * self._family.stages)
            memory = self._even.cost.stage_cost(plan, stage).totals.memory
            return memory.total_mib - self._even.cost.options.context_mib <= self._even.budget_mib

        return fits

    def _mib(self, plan: Plan) -> float:
        """Memory on the stage with the highest peak, without the reserve, which all plans share."""
        stages = self._even.cost.predict(plan).stages
        return max(stage.memory.total_mib for stage in stages) - self._even.cost.options.context_mib


def fewest(fits: Callable[[int], bool], most: int) -> int | None:
    """The fewest layers of a stage that recompute where it fits. Between 1 and `most` - 1 its memory changes evenly;
    none or all of them change the memory besides kept activations, too."""
    if fits(0):
        return 0
    if most > 1 and fits(most - 1):
        return 1 + bisect_left(range(1, most), True, key=fits)
    return most if most and fits(most) else None
