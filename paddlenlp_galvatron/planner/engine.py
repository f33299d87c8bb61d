"""The search: families of plans in the order of their lower bounds, until no bound is below the best plan's time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from threading import Event, Lock, Thread

import galvatron_dp_core

from ..base import GIB_MIB, MS_PER_S, UserError
from ..cost_model import CostModel
from ..plan import ModelShape, Plan
from ..plan.export import untaught
from .bounds import Cores, OpenFamily, Phase
from .branch_and_bound import MOST_STARTS, MOST_TRIALS, BranchAndBound, Incumbents, Start, Watch
from .branches import Branches
from .core_arrays import compute_bound_ms
from .options import SearchOptions
from .result import Candidate, FamilyOutcome, Need, SearchResult, documented
from .simplest import FewStrategies, Part
from .space import PlanFamily, Strategies

CHOSEN = "global_batch", "micro_batches", "stages", "layers", "vocab", "schedule", "chunks"  # fields of a plan


def search(
    model: ModelShape | Sequence[ModelShape],
    cost: CostModel,
    options: SearchOptions = SearchOptions(),
    log: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    known: Sequence[Plan] = (),
    seconds: float | None = None,
    cancel: galvatron_dp_core.Cancel | None = None,
    compared: bool = True,
) -> SearchResult:
    """Find the plan with the lowest predicted time per sample (`cost.predict`), with its lower bound; of plans that
    take at most `options.simplest_within` per cent longer, the simplest. `compared`: False: only the fastest plan,
    without comparison with plans of one strategy for all layers.

    `model` is the shape of all layers, or one shape for each layer type in the order of the layers; `cost` is of it.
    The plan's metadata say what is predicted and what it was searched from. `log` receives one line per family, `watch`
    the progress, often. `known`: plans to begin with; those outside the space are ignored. `seconds`: processor time
    after which open families are given up and only their bounds count; `cancel` does the same, from a signal handler or
    another thread. Raises UserError if the options contradict the cost model or a profile lacks an entry for a
    strategy.
    """
    models = (model,) if isinstance(model, ModelShape) else tuple(model)
    _require_agreement(models, cost, options)
    running = _Search(cost, options, cancel or galvatron_dp_core.Cancel())
    with _no_garbage():
        return running.run(known, seconds, compared, log, watch)


class _Search:
    """One search: opens the families, runs branch and bound over them, and looks for simpler plans."""

    def __init__(self, cost: CostModel, options: SearchOptions, cancel: galvatron_dp_core.Cancel):
        self.cost, self.options, self.cancel = cost, options, cancel
        self.branches = Branches(cost, options)

    def run(
        self,
        plans: Sequence[Plan],
        seconds: float | None,
        compared: bool,
        log: Callable[[str], None] | None,
        watch: Watch | None,
    ) -> SearchResult:
        limits = [limit for limit in (seconds, self.options.time_limit) if limit is not None]
        start, end = time.perf_counter(), time.process_time() + min(limits, default=inf)
        best, space = Incumbents(self.options.top_k, gap=self.options.gap), self.branches.strategies()
        begin = None if self.branches.even else self._start
        solver = self._solver(best, begin, None if self._exhaustive else MOST_TRIALS)
        opened = [*self._opened(space, best)]
        everything = [(entry, entry.strategies) for entry in opened]
        self._begin_with(plans, space, best)
        with _cancelled_at(end, self.cancel):
            begun = self._begin_alike(opened, best) if compared or not best.found else None
            solver.run(opened, log, watch)
            if ranked := best.ranked:
                chosen, uniform, uniform_bound_s = ranked[0], None, None
                step_s = chosen.plan.global_batch / MS_PER_S  # step time at one ms per sample
                if compared and not self.branches.even and not self.cancel.cancelled:
                    chosen, uniform, open_ms = self._simpler(best, everything, begun)
                    uniform_bound_s = min(uniform.time_s if uniform else inf, open_ms * step_s)
                    best.offer(chosen, PlanFamily.of(chosen.plan))  # searches with few strategies are more thorough
                fastest, *_ = ranked = best.ranked
                lower_bound_s = min(fastest.time_s, best.unproven_ms * step_s)
                left_out_s = best.left_out_ms * fastest.plan.global_batch / MS_PER_S
        if not ranked:
            need = None if self.cancel.cancelled else self._need(solver)
            searched_s, stopped = time.perf_counter() - start, self.cancel.cancelled
            return SearchResult(None, inf, searched_s, best.outcomes, best.bounds_s, need=need, stopped=stopped)
        family = PlanFamily.of(chosen.plan)
        others = [other for other in ranked if PlanFamily.of(other.plan) != family]
        return SearchResult(
            best=documented(chosen, self.cost, self.options, lower_bound_s, left_out_s),
            lower_bound_s=lower_bound_s,
            search_time_s=time.perf_counter() - start,
            outcomes=best.outcomes,
            bounds_s=best.bounds_s,
            runners_up=tuple(others[: self.options.top_k - 1]),
            fastest=fastest,
            uniform=uniform,
            uniform_bound_s=uniform_bound_s,
            too_wide=len(solver.cores.too_wide),
            stopped=self.cancel.cancelled,
            left_out_s=left_out_s,
        )

    @property
    def _exhaustive(self) -> bool:
        """Whether interleaved plans are searched to the end."""
        return self.options.max_virtual_pp_deg is not None

    def _solver(self, best: Incumbents, start: Start | None, trials: int | None) -> BranchAndBound:
        cores = Cores(self.branches, self.cost, self.options.budget_mib, self.cancel)
        return BranchAndBound(cores, self.cost, self.options, self.branches.bare, best, start, trials)

    def _start(self, entry: OpenFamily, limit_ms: float) -> Candidate | None:
        """The best plan of a family with one strategy for all layers, if it takes less per sample than the limit."""
        return self._few(MOST_STARTS).best_uniform([entry.part], limit_ms)[0]

    def _few(self, trials: int | None) -> FewStrategies:
        return FewStrategies(self.cost, self.options.budget_mib, partial(self._best_of, trials=trials))

    def _opened(self, space: dict[PlanFamily, list[Strategies]], best: Incumbents) -> Iterator[OpenFamily]:
        """The families with their first bounds."""
        bounds: dict[tuple[PlanFamily, object], float] = {}  # families with several chunks share a bound
        number = 0
        for family, spaces in space.items():
            best.note(family, FamilyOutcome.OUT_OF_MEMORY if spaces else FamilyOutcome.NOT_DIVISIBLE)
            if self.cancel.cancelled:  # the other families have no bounds yet
                best.unproven_ms = 0.0
                return
            for strategies in spaces:
                plain = tuple(layers[0] for layers in strategies.layers) if self.branches.even else strategies
                alike = replace(family, chunks=min(family.chunks, 2)), plain
                if alike not in bounds:
                    bounds[alike] = compute_bound_ms(family, strategies, self.cost) / family.global_batch
                yield OpenFamily(bounds[alike], number, family, strategies, Phase.first(family))
                number += 1

    def _begin_with(self, plans: Sequence[Plan], space: dict[PlanFamily, list[Strategies]], best: Incumbents) -> None:
        """Offer plans that are known: families that cannot beat them need not be solved."""
        for plan in plans:
            mine = replace(self.branches.bare, **{name: getattr(plan, name) for name in CHOSEN})
            family = PlanFamily.of(mine)
            even, spaces = self.branches.even, space.get(family, ())
            if any(each.have(mine, self.cost.layer_types) for each in spaces) and (not even or even.expressible(mine)):
                candidate = Candidate(mine, self.cost.predict(mine))
                if candidate.fits(self.options.memory_gib * GIB_MIB):
                    best.offer(candidate, family)

    def _begin_alike(self, opened: Sequence[OpenFamily], best: Incumbents) -> tuple[Candidate | None, float] | None:
        """Offer the best plan of a batch with one chunk a stage and one strategy for all layers. Returns it with the
        lowest bound of open families."""
        if self.branches.even or len(self.options.batches) > 1:
            return None
        flat = [entry.part for entry in opened if entry.family.chunks == 1]
        uniform, bound = self._few(None).best_uniform(flat)
        if uniform:
            best.offer(uniform, PlanFamily.of(uniform.plan))
        return uniform, bound

    def _simpler(
        self,
        best: Incumbents,
        everything: Iterable[tuple[OpenFamily, Strategies]],
        begun: tuple[Candidate | None, float] | None,
    ) -> tuple[Candidate, Candidate | None, float]:
        """The simplest plan within the tolerance, and the best plan of one strategy with the lowest bound of open
        families, in ms per sample; all at the fastest plan's batch. `everything`: families with all their strategies,
        as a strategy dominated for one run of layers may be the best that all runs share. `begun`: the result for one
        chunk a stage."""
        fastest = best.ranked[0]
        if fastest.strategies == 1:
            return fastest, fastest, best.unproven_ms
        parts = [
            (entry.bound, entry.family, strategies if len(self.branches.runs) > 1 else entry.strategies)
            for entry, strategies in everything
            if entry.family.global_batch == fastest.plan.global_batch
            and (entry.family in best.found or best.outcomes[entry.family] is not FamilyOutcome.LEFT_OUT)
        ]
        begun_with, open_ms = begun or (None, inf)
        rest = [bounded for bounded in parts if bounded[1].chunks > 1 or not begun]
        few = self._few(None if self._exhaustive else MOST_STARTS)
        uniform, bound = few.best_uniform(rest, begun_with.ms_per_sample if begun_with else inf)
        uniform, bound = uniform or begun_with, min(bound, open_ms)
        if uniform:  # may be faster than all others if a search ended with a gap
            best.offer(uniform, PlanFamily.of(uniform.plan))
            fastest = best.ranked[0]
        if not self.options.simplest_within:
            return fastest, uniform, bound
        most_ms = fastest.ms_per_sample * (1 + self.options.simplest_within / 100)
        return few.simplest(fastest, parts, uniform, most_ms), uniform, bound

    def _best_of(self, parts: Iterable[Part], most_ms: float, trials: int | None) -> tuple[Candidate | None, float]:
        """Solve parts with a small effort, as a `simplest.Solve`."""
        best = Incumbents(top_k=1, most_ms=most_ms, gap=self.options.gap)
        opened = [OpenFamily(each[0], number, *each[1:], Phase.first(each[1])) for number, each in enumerate(parts)]
        self._solver(best, None, trials).run(opened, last=Phase.ONE_CHUNK)
        return next(iter(best.ranked), None), best.unproven_ms

    def _need(self, solver: BranchAndBound) -> Need | None:
        """The least memory with which a family has a plan; one chunk a stage needs least."""
        least: tuple[float, Plan] | None = None
        for entry in solver.too_big:
            if entry.family.chunks > 1:
                continue
            try:
                mib, vocab, division, choice = solver.cores.core(entry).least_memory(self.cancel)
            except RuntimeError:
                if self.cancel.cancelled:
                    return None
                raise
            if mib < (least[0] if least else inf):
                least = mib, entry.strategies.plan(entry.family, vocab, division, choice, self.branches.bare)
        return Need.of(least[1], self.cost).under(self.cost, self.options) if least else None


@contextmanager
def _cancelled_at(end: float, cancelled: galvatron_dp_core.Cancel) -> Iterator[None]:
    """Limit processor time, so that other programs change no answer."""
    ended, ending = Event(), Lock()

    def cancel() -> None:
        while (left := end - time.process_time()) > 0:
            if ended.wait(left):
                return
        with ending:
            if not ended.is_set():
                cancelled.cancel()

    if end < inf:
        Thread(target=cancel, daemon=True).start()
    try:
        yield
    finally:
        with ending:
            ended.set()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause Python's garbage collector: tens of thousands of prices are kept, none in a cycle, and scanning them takes
    a third of the time."""
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked_for:
            gc.enable()


def _require_agreement(models: Sequence[ModelShape], cost: CostModel, options: SearchOptions) -> None:
    faults = []
    most = len(cost.given) if options.trainer == "paddlefleet" else len(cost.models)
    if options.trainer != "galvatron" and most > 1:
        faults.append(f"trainer: {options.trainer} has one type of layers, the model {len(cost.models)}; leave it out")
    if options.trainer != "galvatron" and (lacking := untaught(cost.models)):
        faults.append(f"trainer: {lacking} of {cost.given[0].name} are not written for {options.trainer}; leave it out")
    if models != cost.given:
        faults.append("model: it is not that of the cost model; make them agree")
    asked = options.assumptions
    compared = (
        *cost.assumed.completed(asked).unlike(asked.completed(cost.assumed)),
        ("context_mib", cost.options.context_mib, options.reserve_mib),
        ("task", cost.options.task, options.trained),
    )
    unlike = ((name, ours, theirs) for name, ours, theirs in compared if ours != theirs)
    faults += [f"{name}: {theirs}, but {ours} in the cost model; make them agree" for name, ours, theirs in unlike]
    if (cost.profiles.num_nodes, cost.profiles.gpus_per_node) != (options.num_nodes, options.num_gpus_per_node):
        faults.append(
            f"num_nodes, num_gpus_per_node: {options.num_nodes} x {options.num_gpus_per_node}, but the cost model is "
            f"of {cost.profiles.num_nodes} x {cost.profiles.gpus_per_node}; make them agree"
        )
    if faults:
        raise UserError(faults)
