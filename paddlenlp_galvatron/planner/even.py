"""Plans that another program's trainer can run: one strategy for all layers and the vocabulary, and its divisions into
stages.

Only the recomputed layers of each stage are left to choose. All layers of a run cost the same, so the number of layers
per choice is enough. Stages are independent: each takes the fastest choice that fits. With several chunks a stage this
minimizes the sum of its chunks' times, which bounds the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np
from galvatron_dp_core import Cancel
from numpy.typing import NDArray

from ..cost_model import CostModel, StageTimes, step_ms
from ..cost_model.collectives import MTP_CHANGES
from ..model import MODULES, Recompute
from ..plan import DataParallel, LayerStrategy, ModelShape, Plan, Schedule, VocabStrategy, find_faults
from ..plan.export import FLEET, PROGRAMS, gaps
from ..plan.schedule import ByKind, PassKind, chunks_in_flight
from ..plan.strategy import all_sharing
from ..plan.uniform import even_stages
from ..profiles.memory import Role
from .core_arrays import NUMBERS, SUMMED
from .space import PlanFamily, Strategies, cost_numbers, runs_of, unbeaten, without_experts

Floats = NDArray[np.float64]
Counts = tuple[tuple[int, ...], ...]  # for each run of layers of a part: number of layers with each choice
Chosen = tuple[float, float, int, Sequence[int], Sequence[int]]  # answer of the core's `solve`
FORWARD, BACKWARD, SYNC, STATES, KEPT = range(SUMMED)  # numbers of a cost; those of the workspace follow
MOST_MERGED = 64  # combinations that are merged without pruning


@dataclass(frozen=True)
class EvenPlans:
    """Plans of a model that another program can run."""

    program: str  # a name in PROGRAMS
    model: ModelShape
    cost: CostModel
    budget_mib: float  # budget without the reserve
    bare: Plan  # the fields that all plans of a search share

    def expressible(self, plan: Plan) -> bool:
        return not gaps(plan, PROGRAMS[self.program], self.model)

    def divisions(self, parts: int) -> Iterator[tuple[int, ...]]:
        """Divisions of layers into parts, with the shortest longest part first; empty if the program has none. MTP
        layers are in the last part, possibly alone."""
        layers, behind = self.model.main_layers, self.model.mtp_layers
        if layers % parts == 0:
            *parts_before, last = even_stages(layers, parts)
            yield (*parts_before, last + behind)
        if PROGRAMS[self.program] != FLEET or parts == 1:
            return
        for most in range(-(-layers // parts), layers + 1):  # layers of all parts but the first and the last
            ends = layers - most * (parts - 2)
            for first in range(max(1, ends - most), min(most, ends - (not behind)) + 1):
                lengths = first, ends - first
                if min(lengths) < most and (parts > 2 or max(lengths) == most):
                    yield (first, *[most] * (parts - 2), ends - first + behind)

    def spaces(
        self, of_types: Sequence[Sequence[LayerStrategy]], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Every strategy that all layers can have, with its variants that recompute."""
        kinds = [model.experts > 0 for model in self.cost.models]
        twins = [_by_strategy(layers) for layers in of_types]
        runs = [run.types[0] for run in runs_of(self.cost.layer_types)]
        spaces: list[Strategies] = []
        if next(self.divisions(family.stages), None) is None:
            return spaces
        for layer in twins[kinds.index(max(kinds))]:
            apart = all_sharing(family.stage_size, layer.ep) > 1
            if layer.dp_type is DataParallel.ZERO3 and family.stages > 1:
                continue
            if layer.ep > 1 and (layer.ep % layer.tp or layer.sharding):
                continue
            if apart and (layer.experts_dp_type or layer.experts_sharding):
                continue
            like = layer.axes, layer.dp_type, layer.sharding
            vocab = [each for each in vocabularies if (each.axes, each.dp_type, each.sharding) == like]
            plain = [layer if experts else without_experts(layer) for experts in kinds]
            if not vocab or not all(each in groups for each, groups in zip(plain, twins, strict=True)):
                continue
            again = [[twin for twin in group[each] if twin.recompute] for each, group in zip(plain, twins, strict=True)]
            modules = [[each for each in group if each.recompute in MODULES] for group in again]
            hows = dict.fromkeys(each.recompute for each in again[-1] if each.recompute not in MODULES)
            choices = [[[each for each in group if each.recompute is how] for group in again] for how in hows]
            for more in [*choices, *([modules] if any(modules) else [])] or [[[]] * len(plain)]:
                spaces.append(Strategies([[plain[kind], *more[kind]] for kind in runs], vocab))
        return spaces

    def has(self, family: PlanFamily) -> bool:
        """Whether the program has the schedule, and a layer for each part."""
        count, stages = family.micro_batches, family.stages
        if family.chunks > 1 and (stages == 2 or count % stages or count < 2 * stages):
            return False
        alike = stages == 1 or family.schedule is Schedule.ONE_F_ONE_B
        return alike and self.model.layers >= stages * family.chunks

    def core(self, family: PlanFamily, strategies: Strategies) -> EvenCore:
        return EvenCore(family, strategies, self)


def _by_strategy(layers: Sequence[LayerStrategy]) -> dict[LayerStrategy, list[LayerStrategy]]:
    """Strategies that differ only in recompute, by the strategy without recompute."""
    groups: dict[LayerStrategy, list[LayerStrategy]] = {}
    for layer in layers:
        groups.setdefault(replace(layer, recompute=Recompute.NONE), []).append(layer)
    return {plain: group for plain, group in groups.items() if plain in group}


class EvenCore:
    """Replaces the core's object of a family; times in ms, as in the core."""

    def __init__(self, family: PlanFamily, strategies: Strategies, even: EvenPlans):
        self._family, self._strategies, self._even = family, strategies, even
        self._parts = family.stages * family.chunks
        self._runs = runs_of(even.cost.layer_types)
        self._options = lru_cache(maxsize=None)(self._every_option)
        self._known: dict[tuple[object, ...], list[Counts] | None] = {}  # keyed by stage and its layers by run

    def bound(self, cancel: Cancel) -> float:
        return self._bound_ms

    @cached_property
    def _bound_ms(self) -> float:
        least, counts = inf, np.array([run.units for run in self._runs])
        kept = [rows[:, STATES] + rows[:, KEPT] for rows in self._rows]  # one micro-batch at least
        mib = counts @ [each.min() for each in kept] + self._ends[:, STATES].sum()
        mib += self._family.stages * min(rows[:, SUMMED:].sum(axis=1).min() for rows in self._rows)
        if mib > self._family.stages * self._even.budget_mib:
            return inf
        for division in self._even.divisions(self._parts):
            if self._longest_ms(division) >= least:
                break  # later divisions are longer
            least = min(least, self._least_ms(self._layers(division)))
        return least

    def tight_bound(self, limit_ms: float, cancel: Cancel) -> float:
        return 0.0

    def solve(self, limit_ms: float, effort: int, cancel: Cancel, gap: float) -> Chosen:
        best_ms, proven_ms, best = limit_ms, limit_ms, None
        for division in self._even.divisions(self._parts):
            if cancel.cancelled or self._longest_ms(division) >= best_ms:
                break
            layers = self._layers(division)
            if self._least_ms(layers) >= best_ms:
                continue
            for counts in self._tried(layers):
                bound_ms = self._least_ms(layers, counts)
                if bound_ms >= best_ms:
                    break  # later choices recompute more
                time_ms = self._step_ms(self._numbers(counts))
                least_ms = time_ms if self._family.chunks == 1 else self._step_ms(self._fastest(layers))
                bound_ms = max(bound_ms, least_ms)  # the step without recompute is a lower bound
                if time_ms >= best_ms or self._can_run(division, counts):
                    proven_ms = min(proven_ms, bound_ms)
                    if time_ms < best_ms:
                        best_ms, best = time_ms, (division, self._choice(counts))
                    break
        return (best_ms, min(proven_ms, best_ms), 0, *best) if best else (inf, proven_ms, 0, (), ())

    def least_memory(self, cancel: Cancel) -> tuple[float, int, Sequence[int], Sequence[int]]:
        candidates = []
        for division in self._even.divisions(self._parts):
            layers = self._layers(division)
            alike = (self._alike(layers, count) for count in (0, max(division)))
            for counts in (self._fewest(layers, least_memory=True), *alike):
                if counts is not None:
                    candidates.append((max(self._stages_mib(counts)), division, counts))
        for mib, division, counts in sorted(candidates, key=lambda candidate: candidate[0]):
            if self._can_run(division, counts):
                return mib, 0, division, self._choice(counts)
        return inf, 0, (), ()  # gpipe's answer

    def _can_run(self, division: Sequence[int], counts: Sequence[Counts]) -> bool:
        plan = self._strategies.plan(self._family, 0, division, self._choice(counts), self._even.bare)
        return self._even.expressible(plan) and not find_faults(plan, self._even.model)

    def _layers(self, division: Sequence[int]) -> list[tuple[int, ...]]:
        """Layers of each part by run."""
        bounds = list(pairwise(accumulate(division, initial=0)))
        spans = [(run.start, run.start + run.units) for run in self._runs]
        return [tuple(max(0, min(stop, end) - max(start, at)) for start, end in spans) for at, stop in bounds]

    def _choice(self, counts: Sequence[Counts]) -> list[int]:
        """The number of each layer's strategy: the first layers of each part recompute."""
        firsts = list(accumulate(map(len, self._strategies.layers), initial=0))
        return [
            first + number
            for chunk in counts
            for first, counted in zip(firsts, chunk, strict=False)
            for number, times in [*list(enumerate(counted))[1:], (0, counted[0])]
            for _ in range(times)
        ]

    # Prices.

    @cached_property
    def _rows(self) -> list[Floats]:
        """Costs of each choice of each run of layers."""
        cost, setting = self._even.cost, self._family.setting
        return [
            np.array(
                [cost_numbers(cost.layer_cost(choice, setting, run.types[0]), cost.options.freed) for choice in choices]
            )
            for run, choices in zip(self._runs, self._strategies.layers, strict=True)
        ]

    @cached_property
    def _least(self) -> Floats:
        """Time of both passes of a micro-batch through a layer of each run without recompute, and the least sync."""
        return np.array([[*rows[0, :SYNC], rows[:, SYNC].min()] for rows in self._rows])

    @cached_property
    def _ends(self) -> Floats:
        """Costs of each part besides its layers."""
        cost, family, last = self._even.cost, self._family, self._parts - 1
        setting, (vocab, *_), layer = family.setting, self._strategies.vocabularies, self._strategies.layers[0][0]

        def row(position: int) -> list[float]:
            role: Role = "only" if not last else "first" if not position else "last"
            later = position >= family.stages or position % family.stages in (0, family.stages - 1)
            price = cost.middle_cost(setting, later) if 0 < position < last else cost.vocab_cost(vocab, setting, role)
            into = cost.switch_cost(None if position else vocab, layer, setting)
            out_of = cost.switch_cost(layer, None if position < last else vocab, setting)
            if position == last and self._even.model.mtp_layers:
                out_of = ByKind(*[MTP_CHANGES / 2 * sum(out_of)] * len(PassKind))
            passes_ms = (sum(each) for each in zip(price.passes_ms, into, out_of, strict=True))
            return [*passes_ms, *cost_numbers(price, cost.options.freed)[len(PassKind) :]]

        return np.array([row(position) for position in range(self._parts)])

    def _least_ms(self, layers: Sequence[tuple[int, ...]], counts: Sequence[Counts] = ()) -> float:
        """A lower bound: a stage processes all micro-batches, while the first and the last of them also pass through
        the earlier stages, of which the first reduces gradients last. Without `counts`: no recompute."""
        passes, shape = slice(FORWARD, SYNC), (self._family.chunks, -1)
        least = self._fastest(layers)
        sync, parts = least[:, SYNC].reshape(shape).sum(axis=0), self._numbers(counts) if counts else least
        forward, backward = (way.reshape(shape) for way in parts[:, passes].T)
        into, out_of = (np.cumsum(ms[0]) - ms[0] + self._send_ms * np.arange(len(sync)) for ms in (forward, backward))
        stages = self._family.micro_batches * (forward + backward).sum(axis=0) + into
        return float(np.maximum(stages + sync, stages + out_of + sync[0]).max())

    def _fastest(self, layers: Sequence[tuple[int, ...]]) -> Floats:
        """Passes and sync of each part without recompute; [parts, SYNC + 1]."""
        return np.asarray(np.array(layers) @ self._least + self._ends[:, : SYNC + 1])

    def _longest_ms(self, division: Sequence[int]) -> float:
        """A lower bound by only the longest part."""
        return max(division) * self._family.micro_batches * self._layer_ms

    @cached_property
    def _layer_ms(self) -> float:
        return float(self._least[:, :SYNC].sum(axis=1).min())

    @cached_property
    def _send_ms(self) -> float:
        return self._even.cost.boundary_cost(self._family.setting) if self._parts > 1 else 0.0

    def _numbers(self, counts: Sequence[Counts]) -> Floats:
        """Costs of parts; [parts, numbers]."""
        numbers = self._ends.copy()
        for position, runs in enumerate(counts):
            for rows, counted in zip(self._rows, runs, strict=True):
                numbers[position, :SUMMED] += np.array(counted) @ rows[:, :SUMMED]
                for number, times in enumerate(counted):
                    if times:
                        numbers[position, SUMMED:] = np.maximum(numbers[position, SUMMED:], rows[number, SUMMED:])
        return numbers

    def _step_ms(self, numbers: Floats) -> float:
        """`numbers`: costs of each part, at least up to SYNC."""
        family = self._family
        sync_ms = numbers[:, SYNC].reshape(family.chunks, -1).sum(axis=0)
        passes_ms: ByKind[Sequence[float]] = ByKind(list(numbers[:, FORWARD]), list(numbers[:, BACKWARD]))
        times = StageTimes(passes_ms, list(sync_ms), [self._send_ms] * (self._parts - 1))
        return step_ms(family.schedule, times, family.micro_batches)

    def _stages_mib(self, counts: Sequence[Counts]) -> Floats:
        """Memory of each stage without the common reserve."""
        parts = self._numbers(counts).reshape(self._family.chunks, -1, NUMBERS)
        kept = [(self._held(stage) @ parts[:, stage, KEPT]).max() for stage in range(self._family.stages)]
        return np.asarray(parts[..., STATES].sum(axis=0) + kept + parts[..., SUMMED:].max(axis=0).sum(axis=1))

    def _held(self, stage: int) -> NDArray[np.int64]:
        """Micro-batches in flight of each chunk at each possible peak; [moments, chunks]."""
        family = self._family
        size = family.stages, family.micro_batches, family.chunks
        return np.array(chunks_in_flight(family.schedule, stage, *size))

    # Layers that recompute.

    def _tried(self, layers: Sequence[tuple[int, ...]]) -> Iterator[list[Counts]]:
        """Recomputed layers of each part: the fastest choice that fits in each stage; if the program needs equal
        numbers, the fewest that fit in all; if it has all or none, all."""
        if (counts := self._fewest(layers)) is None:
            return  # equal numbers do not fit either
        yield counts
        for count in range(max(map(sum, layers)) + 1):
            if (alike := self._alike(layers, count)) and (self._stages_mib(alike) <= self._even.budget_mib).all():
                yield alike

    def _alike(self, layers: Sequence[tuple[int, ...]], count: int) -> list[Counts] | None:
        """Equal numbers of the first layers of each part recompute; None: in different ways."""
        if any(len(choices) > 2 for choices in self._strategies.layers):
            return None
        made = []
        for chunk in layers:
            left, runs = count, []
            for length, choices in zip(chunk, self._strategies.layers, strict=True):
                again = min(left, length) if len(choices) > 1 else 0
                runs.append((length - again, again)[: len(choices)])
                left -= again
            made.append(tuple(runs))
        return made

    def _fewest(self, layers: Sequence[tuple[int, ...]], least_memory: bool = False) -> list[Counts] | None:
        """Counts of each part with the least time that fits in each stage, or with the least memory; None: none fit."""
        counts: list[Counts] = [()] * len(layers)
        for stage in range(self._family.stages):
            of_stage = tuple(layers[stage :: self._family.stages])
            key = stage, of_stage, least_memory
            if key not in self._known:
                self._known[key] = self._cheapest(stage, of_stage, least_memory)
            if (cheapest := self._known[key]) is None:
                return None
            counts[stage :: self._family.stages] = cheapest
        return counts

    def _cheapest(self, stage: int, layers: Sequence[tuple[int, ...]], least_memory: bool) -> list[Counts] | None:
        held, ends = self._held(stage), self._ends[stage :: self._family.stages]
        # Each combination has its time, its memory at each moment without the workspace, and its workspace.
        start = [0.0, *(ends[:, STATES].sum() + held @ ends[:, KEPT]), *ends[:, SUMMED:].max(axis=0)]
        moments = 1 + len(held)
        ways, numbers = np.zeros((1, 0), dtype=np.int64), np.array([start])
        for chunk, lengths in enumerate(layers):
            for run, length in enumerate(lengths):
                if len(numbers) > MOST_MERGED and length:
                    left = unbeaten(range(len(numbers)), numbers)
                    ways, numbers = ways[left], numbers[left]
                counts, costs, workspace = self._options(run, length)
                time = costs[:, [FORWARD, BACKWARD]].sum(axis=1, keepdims=True)
                mib = costs[:, [STATES]] + costs[:, [KEPT]] * held[:, chunk]
                sums = numbers[:, None, :moments] + np.hstack((time, mib))
                most = np.maximum(numbers[:, None, moments:], workspace)
                numbers = np.concatenate((sums, most), axis=2).reshape(-1, numbers.shape[1])
                ahead, behind = np.indices((len(ways), len(counts))).reshape(2, -1)
                ways = np.hstack((ways[ahead], counts[behind]))
        total_mib = numbers[:, 1:moments].max(axis=1) + numbers[:, moments:].sum(axis=1)
        fits = total_mib <= self._even.budget_mib
        if not (least_memory or fits.any()):
            return None
        best = total_mib.argmin() if least_memory else np.where(fits, numbers[:, 0], inf).argmin()
        row, widths = ways[best].tolist(), [len(choices) for choices in self._strategies.layers]
        bounds = list(pairwise(accumulate(widths * self._family.chunks, initial=0)))
        runs = [tuple(row[at:stop]) for at, stop in bounds]
        return [tuple(runs[at : at + len(widths)]) for at in range(0, len(runs), len(widths))]

    def _every_option(self, run: int, length: int) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Every distribution of `count` layers of a run over its choices: numbers per choice, costs, workspace."""
        rows = self._rows[run]
        counts = _shares(length, len(rows))
        workspace = np.where(counts[..., None] > 0, rows[:, SUMMED:], 0.0).max(axis=1)
        return counts, counts @ rows[:, :SUMMED], workspace


@lru_cache(maxsize=1024)
def _shares(layers: int, choices: int) -> NDArray[np.int64]:
    """Every distribution of layers over choices: numbers per choice; [distributions, choices]."""
    if choices == 1:
        return np.array([[layers]])
    ways = [np.insert(_shares(layers - first, choices - 1), 0, first, axis=1) for first in range(layers + 1)]
    return np.concatenate(ways)
