"""Simpler plans than the fastest: the best with one strategy for all layers, and the simplest within a tolerance.

The best plan with one strategy is exact, so an answer with two strategies has the fewest. If the fastest plan has three
or more, subsets of its strategies are searched, and pairs from families with one chunk a stage that may have a plan
within the tolerance, up to `MOST_PAIRS` of each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from math import inf

from ..cost_model import CostModel
from ..plan import LayerStrategy
from ..plan.schedule import chunks_in_flight
from .result import ROUNDING, Candidate
from .space import PlanFamily, Strategies, suited, without_experts

MOST_PAIRS = 300  # pairs of a family's strategies, fastest first
MOST_SETS = 100  # sets of the fastest plan's strategies

Part = tuple[float, PlanFamily, Strategies]  # a part of the space: lower bound in ms per sample, family, strategies
# Finds the fastest plan of several parts below a limit in ms per sample, and the lowest bound of open families.
Solve = Callable[[Iterable[Part], float], tuple[Candidate | None, float]]


@dataclass(frozen=True, slots=True)
class FewStrategies:
    """Searches of plans with few strategies."""

    cost: CostModel
    budget_mib: float
    solve: Solve

    def best_uniform(self, parts: Iterable[Part], limit: float = inf) -> tuple[Candidate | None, float]:
        """The fastest plan with one strategy for all layers below a limit, and the lowest bound of open families, in ms
        per sample."""
        best, bound = None, inf
        for bounded in sorted(parts, key=lambda bounded: bounded[0]):
            if bounded[0] >= limit:
                break
            candidate, still_open = self.solve(_narrowed(bounded, 1, self.cost, self.budget_mib), limit)
            bound = min(bound, still_open)
            if candidate:
                best, limit = candidate, candidate.ms_per_sample
        return best, bound

    def simplest(
        self, fastest: Candidate, parts: Iterable[Part], uniform: Candidate | None, most_ms: float
    ) -> Candidate:
        """The plan with the fewest strategies that takes at most `most_ms` per sample."""
        if uniform and uniform.ms_per_sample <= most_ms:
            return uniform
        near = [bounded for bounded in sorted(parts, key=lambda bounded: bounded[0]) if bounded[0] < most_ms]
        used = set(fastest.plan.layers)
        subsets = [
            (least, family, replace(space, layers=[[each for each in run if each in used] for run in space.layers]))
            for least, family, space in near
            if family == PlanFamily.of(fastest.plan) and space.have(fastest.plan, self.cost.layer_types)
        ]
        flat = [each for each in near if each[1].chunks == 1]  # with several chunks bounds are too low to reject pairs
        for count in range(2, len(used)):
            for wider, most in ((subsets, MOST_SETS), (flat if count == 2 else [], MOST_PAIRS)):
                sets = (_narrowed(each, count, self.cost, self.budget_mib) for each in wider)
                if best := self.solve([narrow for each in sets for narrow in islice(each, most)], most_ms)[0]:
                    return best
        return fastest


def _narrowed(bounded: Part, count: int, cost: CostModel, budget_mib: float) -> Iterator[Part]:
    """The parts with each set of `count` strategies whose layers fit in memory, fastest first. Bound: the mean busy
    time of the stages."""
    least, family, strategies = bounded
    busy_ms: list[dict[LayerStrategy, float]] = []  # per sample and stage, by run of layers
    rooms: list[dict[LayerStrategy, int]] = []  # one entry a run of layers
    of_stage = family.stages, family.micro_batches, family.chunks
    held = Counter(min(chunks_in_flight(family.schedule, stage, *of_stage)[0]) for stage in range(family.stages))
    behind = strategies.runs(cost.layer_types)
    for run, choices in zip(behind, strategies.layers, strict=True):
        passes, share = family.micro_batches, run.units / family.stages / family.global_batch
        busy_ms.append(dict.fromkeys(choices, 0.0))
        states_mib, activations_mib = dict.fromkeys(choices, 0.0), dict.fromkeys(choices, 0.0)
        for strategy, kind in product(choices, run.types):
            price = cost.layer_cost(suited(strategy, cost.models[kind]), family.setting, kind)
            busy_ms[-1][strategy] += share * (passes * sum(price.passes_ms) + price.sync_ms)
            states_mib[strategy] += price.states_mib
            activations_mib[strategy] += price.activation_mib
        rooms.append({each: _room(states_mib[each], activations_mib[each], held, budget_mib) for each in choices})
    least_ms = {strategy: min(ms[strategy] for ms in busy_ms if strategy in ms) for ms in busy_ms for strategy in ms}
    for chosen in combinations(sorted(least_ms, key=lambda strategy: least_ms[strategy]), count):
        dense = [without_experts(strategy) for strategy in chosen]
        layers, fit = [], True
        for run, ms, room in zip(behind, busy_ms, rooms, strict=True):
            allowed = chosen if any(cost.models[kind].experts for kind in run.types) else dense
            layers.append([strategy for strategy in dict.fromkeys(allowed) if strategy in ms])
            fit &= max((room[strategy] for strategy in layers[-1]), default=0) >= run.units
        if not fit:
            continue
        prefixes = [prefix for prefix in strategies.prefixes if set(prefix) <= set(dense)]
        suffixes = [suffix for suffix in strategies.suffixes if set(suffix) <= set(chosen)]
        if prefixes and suffixes:
            bound = sum(min(ms[strategy] for strategy in choices) for ms, choices in zip(busy_ms, layers, strict=True))
            yield max(least, bound), family, replace(strategies, layers=layers, prefixes=prefixes, suffixes=suffixes)


def _room(states_mib: float, activations_mib: float, held: Mapping[int, int], budget_mib: float) -> int:
    """Number of layers that fit in the memory of all stages. `held`: micro-batches in flight -> number of stages."""
    needs_mib = {number: states_mib + number * activations_mib or ROUNDING for number in held}
    return sum(stages * int(budget_mib * (1 + ROUNDING) / needs_mib[number]) for number, stages in held.items())
