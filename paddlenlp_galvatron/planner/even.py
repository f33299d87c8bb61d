"""Plans that another program's trainer can run: one strategy for all layers and the vocabulary, and the divisions into
stages that it has.

How many layers of a stage recompute, and what, is then left to choose. A layer that recomputes makes the step no
shorter, and takes less memory whichever layer of the stage it is, so that the fewest that fit in each stage are the
best. Stages do not depend on each other: the least time of each, and of all divisions, is that of the program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from operator import mul

from galvatron_dp_core import Cancel

from ..cost_model import CostModel, Prediction
from ..model import MODULES, Recompute
from ..plan import LayerStrategy, ModelShape, Plan, VocabStrategy, find_faults
from ..plan.export import FLEET, FORMERS, STOCK, gaps
from ..plan.uniform import even_stages
from .space import PlanFamily, Strategies

PROGRAMS = {"paddlenlp": STOCK, "paddlefleet": FLEET, "paddleformers": FORMERS}
Counts = tuple[int, ...]  # of a stage's layers: those that recompute by each strategy but the first
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

    def divisions(self, stages: int) -> Iterator[tuple[int, ...]]:
        """Layers of each stage, those of the shortest longest stage first; none where the program has none."""
        layers = self.model.layers
        if layers % stages == 0:
            yield even_stages(layers, stages)
        if PROGRAMS[self.program] != FLEET or stages == 1:
            return
        for most in range(-(-layers // stages), layers):  # of all stages but the first and the last
            ends = layers - most * (stages - 2)
            for first in range(max(1, ends - most), min(most, ends - 1) + 1):
                if first < most or ends - first < most:
                    yield (first, *[most] * (stages - 2), ends - first)

    def plan(
        self, family: PlanFamily, strategies: Strategies, division: Sequence[int], counts: Sequence[Counts]
    ) -> Plan:
        """The plan in which the first layers of each stage recompute: so many by each strategy but the first."""
        return strategies.plan(family, 0, division, self.choice(division, counts), self.bare)

    def choice(self, division: Sequence[int], counts: Sequence[Counts]) -> list[int]:
        """The number of each layer's strategy."""
        return [
            number
            for layers, own in zip(division, counts, strict=True)
            for number, times in [*enumerate(own, 1), (0, layers - sum(own))]
            for _ in range(times)
        ]

    def spaces(
        self, layers: Sequence[LayerStrategy], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Every strategy that all layers can have, and where some of them recompute, the same that does."""
        found: list[Strategies] = []
        division = next(self.divisions(family.stages), None)  # others run where this one does
        if division is None:
            return found
        for layer in layers:
            if layer.recompute:
                continue
            alike = [one for one in layers if replace(one, recompute=Recompute.NONE) == layer and one.recompute]
            like = layer.axes, layer.dp_type, layer.sharding
            vocab = [one for one in vocabularies if (one.axes, one.dp_type, one.sharding) == like]
            modules = [one for one in alike if one.recompute in MODULES]  # of which a model may have several
            whole = [[layer, one] for one in alike if one not in modules]
            for choices in [*whole, *([[layer, *modules]] if modules else [])] or [[layer]]:
                one = Strategies([choices], vocab)
                if vocab and self._possible(family, one, division):
                    found.append(one)
        return found

    def _possible(self, family: PlanFamily, strategies: Strategies, division: Sequence[int]) -> bool:
        """Whether the program can run a plan of this division that recomputes nothing, or all by one strategy."""
        rest = [0] * (len(strategies.layers[0]) - 2)
        plans = [self.plan(family, strategies, division, [(0,)] * len(division))]
        if len(strategies.layers[0]) > 1:
            plans.append(self.plan(family, strategies, division, [(layers, *rest) for layers in division]))
        return any(not find_faults(plan, self.model) and self.expressible(plan) for plan in plans)

    def core(self, family: PlanFamily, strategies: Strategies) -> EvenCore:
        return EvenCore(family, strategies, self)


class EvenCore:
    """Replaces the core's object of a family; times in ms, as the core has them."""

    def __init__(self, family: PlanFamily, strategies: Strategies, even: EvenPlans):
        self._family, self._strategies, self._even = family, strategies, even
        self._known: dict[tuple[int, int], Counts | None] = {}  # by stage, and its layers
        self._stages_mib: dict[tuple[int, int, Counts], float] = {}  # by stage, its layers, and those that recompute

    def bound(self, cancel: Cancel) -> float:
        return min((self._least_ms(each) for each in self._even.divisions(self._family.stages)), default=inf)

    def tight_bound(self, limit_ms: float, cancel: Cancel) -> float:
        return 0.0

    def solve(self, limit_ms: float, effort: int, cancel: Cancel, gap: float) -> Chosen:
        best_ms, best = limit_ms, None
        for division in self._even.divisions(self._family.stages):
            if self._least_ms(division) >= best_ms:
                continue
            for counts in self._tried(division):
                if self._least_ms(division, counts) >= best_ms:
                    break  # the others recompute more
                plan = self._plan(division, counts)
                predicted = self._even.cost.predict(plan)
                if self._even.expressible(plan) and self._mib(predicted) <= self._even.budget_mib:
                    if (time_ms := 1000 * predicted.time_s) < best_ms:
                        best_ms, best = time_ms, (division, self._even.choice(division, counts))
                    break
        return (best_ms, best_ms, 0, *best) if best else (inf, best_ms, 0, (), ())

    def least_memory(self, cancel: Cancel) -> tuple[float, int, Sequence[int], Sequence[int]]:
        candidates = sorted(
            (max(self._stage_mib(stage, division, counts[stage]) for stage in range(len(division))), division, counts)
            for division in self._even.divisions(self._family.stages)
            for count in (0, 1, max(division))
            for counts in self._alike(division, count)
        )
        for mib, division, counts in candidates:
            plan = self._plan(division, counts)
            if self._even.expressible(plan) and not find_faults(plan, self._even.model):
                return mib, 0, division, self._even.choice(division, counts)
        return inf, 0, (), ()  # as under gpipe

    def _least_ms(self, division: Sequence[int], counts: Sequence[Counts] = ()) -> float:
        """A lower bound: the longest stage, the last of those, takes all micro-batches; before the first one and behind
        the last one that micro-batch is in the stages in front. Without `counts` nothing recomputes."""
        plain_ms, *_ = self._costs_ms
        stages_ms = [layers * plain_ms for layers in division]
        for stage, own in enumerate(counts):
            stages_ms[stage] += sum(map(mul, own, self._added_ms))
        longest = max(range(len(stages_ms)), key=lambda stage: (stages_ms[stage], stage))
        return self._family.micro_batches * stages_ms[longest] + sum(stages_ms[:longest])

    def _tried(self, division: Sequence[int]) -> Iterator[list[Counts]]:
        """Layers of each stage that recompute: the fewest that fit in each; where the program has as many in each, the
        fewest that fit in all; where it has all or none, all."""
        own: list[Counts] = []
        for stage in range(len(division)):
            if (counts := self._fewest(stage, division)) is None:
                return  # as many in each stage do not fit there, either
            own.append(counts)
        yield own
        if len(self._strategies.layers[0]) == 2:
            most = max(division)
            alike = fewest(lambda count: self._all_fit(division, count), most)
            for count in (alike, most):
                yield from self._alike(division, count) if count is not None else ()

    def _all_fit(self, division: Sequence[int], count: int) -> bool:
        return all(self._fits(stage, division, (min(count, layers),)) for stage, layers in enumerate(division))

    def _alike(self, division: Sequence[int], count: int) -> Iterator[list[Counts]]:
        """As many layers of each stage recompute, by each strategy that does."""
        if len(self._strategies.layers[0]) == 1:
            yield [()] * len(division)
        for number in range(len(self._strategies.layers[0]) - 1):
            yield [(*[0] * number, min(count, layers)) for layers in division]

    def _fewest(self, stage: int, division: Sequence[int]) -> Counts | None:
        """Layers of a stage that recompute by each strategy, in the least time that fits; None: nothing fits."""
        key = stage, division[stage]
        if key not in self._known:
            self._known[key] = self._cheapest(stage, division)
        return self._known[key]

    def _cheapest(self, stage: int, division: Sequence[int]) -> Counts | None:
        layers, several = division[stage], len(self._strategies.layers[0]) > 2
        most_freed = [(*[0] * at, count) for at in range(len(self._added_ms)) for count in (layers, layers - 1)] or [()]
        if several and not any(self._fits(stage, division, counts) for counts in most_freed):
            return None
        best: Counts | None = None
        best_ms, most = inf, layers * (len(self._strategies.layers[0]) > 1)
        for behind in [(second,) for second in range(layers + 1)] if several else [()]:
            if sum(map(mul, behind, self._added_ms[1:])) >= best_ms:
                break
            first = fewest(partial(self._fits_before, stage, division, behind), min(most, layers - sum(behind)))
            if first is not None:
                most = first  # with more layers of the other strategy no more are needed
                if (ms := sum(map(mul, (first, *behind), self._added_ms))) < best_ms:
                    best, best_ms = (first, *behind), ms
        return best

    @cached_property
    def _added_ms(self) -> list[float]:
        """Time that recompute adds to a layer, by each strategy that does."""
        plain_ms, *others_ms = self._costs_ms
        return [each_ms - plain_ms for each_ms in others_ms]

    @cached_property
    def _costs_ms(self) -> list[float]:
        """Both passes of a micro-batch through a layer, by each strategy."""
        setting = self._family.setting
        costs = [self._even.cost.layer_cost(layer, setting) for layer in self._strategies.layers[0]]
        return [cost.forward_ms + cost.backward_ms for cost in costs]

    def _fits_before(self, stage: int, division: Sequence[int], behind: Counts, count: int) -> bool:
        return self._fits(stage, division, (count, *behind))

    def _fits(self, stage: int, division: Sequence[int], counts: Counts) -> bool:
        """Whether a stage in which so many layers recompute is within the budget."""
        return self._stage_mib(stage, division, counts) <= self._even.budget_mib

    def _stage_mib(self, stage: int, division: Sequence[int], counts: Counts) -> float:
        """Memory of a stage in which so many layers recompute, without the reserve, which all plans share."""
        key = stage, division[stage], counts
        if key not in self._stages_mib:
            every: list[Counts] = [()] * len(division)
            every[stage] = counts
            memory = self._even.cost.stage_cost(self._plan(division, every), stage).memory
            self._stages_mib[key] = memory.total_mib - self._even.cost.options.context_mib
        return self._stages_mib[key]

    def _plan(self, division: Sequence[int], counts: Sequence[Counts]) -> Plan:
        return self._even.plan(self._family, self._strategies, division, counts)

    def _mib(self, predicted: Prediction) -> float:
        """Memory on the stage with the highest peak, without the reserve, which all plans share."""
        return max(stage.memory.total_mib for stage in predicted.stages) - self._even.cost.options.context_mib


def fewest(fits: Callable[[int], bool], most: int) -> int | None:
    """The fewest layers of a stage that recompute where it fits. Between 1 and `most` - 1 its memory changes evenly;
    none or all of them change the memory besides kept activations, too."""
    if fits(0):
        return 0
    if most > 1 and fits(most - 1):
        return 1 + bisect_left(range(1, most), True, key=fits)
    return most if most and fits(most) else None
