"""The search itself: families in order of their lower bounds, each solved exactly, until no bound is below the best."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count, product
from math import inf
from threading import Event, Lock, Thread
from typing import Any

import galvatron_dp_core

from ..base.errors import UserError
from ..cost_model import CostModel
from ..cost_model.costs import Prediction
from ..model import joint_fingerprint
from ..plan import LayerStrategy, ModelShape, Plan, VocabStrategy
from ..profiles.reserve import GIB_MIB
from .core_arrays import Core, CostArrays, compute_bound_ms, core_of, cost_arrays, layer_arrays, without_beaten
from .even import EvenCore, EvenPlans, even_spaces
from .options import SearchOptions
from .result import MS_PER_S, ROUNDING, Candidate, FamilyOutcome, Need, SearchResult
from .simplest import Part, best_uniform, simplest, with_fewer_segments
from .space import PlanFamily, Space, Strategies, families, interleaved_families, runs_of, without_experts

# Limits of the search space: about one minute of pricing and 100 MB.
MOST_FAMILIES, MOST_STRATEGIES, MOST_PRICES = 50_000, 2_000, 1_000_000
TRIAL_SHARE = 1 / 64  # of the effort, which every family is given before any has all of it
MOST_RUNS = 8  # of layers of one type, in the core
# Dense layers that are priced with the embedding, and their mixed strategies; with more of these, all have one.
MOST_IN_FRONT, MOST_PREFIXES = 4, 64
AnyCore = Core | EvenCore


@dataclass(frozen=True, slots=True)
class SearchState:
    """How far a search is."""

    families: int
    done: int
    best: float  # samples/s of the best plan so far; 0: none yet
    limit: float  # samples/s that no plan beats; infinite: not known yet


Watch = Callable[[SearchState], None]


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
    """Find the plan of least predicted time per sample (`cost.predict`), with its lower bound; of those that take at
    most `options.simplest_within` per cent longer, the simplest. `compared`: False: the fastest plan alone is wanted,
    and nothing said of plans with one strategy for all layers.

    `model` is the shape of all layers, or one shape for each layer type in the order of the layers; `cost` is of it.
    The plan's metadata say what is predicted and what it was searched from. `log` takes one line a family, `watch` how
    far the search is, often. `known`: plans to begin with; those outside the space are left out. `seconds`: of
    processor time, after which families that are open are given up, and their bounds count; `cancel` does the same,
    from a signal's handler or another thread. Raises UserError where the options contradict the cost model, or a
    profile lacks what a strategy needs.
    """
    models = (model,) if isinstance(model, ModelShape) else tuple(model)
    _require_agreement(models, cost, options)
    return _Search(models, cost, options, log or (lambda line: None), watch, cancel).run(known, seconds, compared)


class _Bound(IntEnum):
    """The last bound of a family's step time; each costs more than the one before, and is higher."""

    COMPUTE = 0  # of its fastest strategies
    LAYERS = 1  # these alone, in the memory that there is
    PATHS = 2  # lower bound from a fixed family of critical paths
    STAGES = 3  # the exact optima of stages
    TRIAL = 4  # a search with a small effort


@dataclass(order=True, slots=True)
class _OpenFamily:
    """A family not yet searched (with one strategy for all layers: one of its strategies)."""

    bound: float  # ms per sample
    number: int  # of equal bounds the first goes first
    by: _Bound = field(compare=False)
    family: PlanFamily = field(compare=False)
    strategies: Strategies = field(compare=False)
    core: AnyCore | None = field(compare=False, default=None)  # from _Bound.PATHS on


class _Search:
    def __init__(
        self,
        models: Sequence[ModelShape],
        cost: CostModel,
        options: SearchOptions,
        log: Callable[[str], None],
        watch: Watch | None,
        cancel: galvatron_dp_core.Cancel | None,
    ):
        self.models, self.cost, self.options, self.log, self.watch = models, cost, options, log, watch
        self.runs = runs_of(cost.layer_types)
        if len(self.runs) > MOST_RUNS:
            raise UserError(
                f"model_size: in {models[0].name} dense layers and layers with experts follow each other in "
                f"{len(self.runs)} runs, of which at most {MOST_RUNS} are searched; write the plan yourself: galvatron "
                "plan uniform"
            )
        dense = len(models) == 1 and len(self.runs) == 2 and not cost.models[0].experts
        self.in_front = self.runs[0].layers if dense and self.runs[0].layers <= MOST_IN_FRONT else 0
        self.spaces = [
            Space(model, replace(cost.assumed, seq_length=seq), options, cost, layer_type)
            for layer_type, (model, seq) in enumerate(zip(cost.models, cost.seqs, strict=True))
        ]  # of each layer type
        self.bare = Plan(
            world_size=cost.world_size,
            global_batch=1,
            micro_batches=1,
            stages=(),
            layers=(),
            default_dp_type=options.default_dp_type,
            assumed=cost.assumed,
            stated=frozenset(name for name, value in asdict(cost.assumed).items() if value is not None),
        )
        even = options.trainer != "galvatron"
        self.even = EvenPlans(options.trainer, models[0], cost, options.budget_mib, self.bare) if even else None
        self.cancel = cancel or galvatron_dp_core.Cancel()
        self.space: dict[PlanFamily, list[Strategies]] = {}
        self.found: dict[PlanFamily, Candidate] = {}
        self.outcomes: dict[PlanFamily, FamilyOutcome] = {}
        self.bounds_s: dict[PlanFamily, float] = {}  # of families that cannot win
        self.unproven = inf  # ms per sample: least lower bound of the families that were given up
        self.waiting: list[_OpenFamily] = []
        self.later: list[_OpenFamily] = []  # of several chunks, while those of one are tried
        self.tried: list[_OpenFamily] = []  # still open; with all effort once all are tried
        self.too_big: list[_OpenFamily] = []  # families that do not fit
        self.opened = 0
        self.most_ms = inf  # per sample, of plans that are looked for
        self.arrays: dict[tuple[object, ...], CostArrays] = {}
        self.unbeaten: dict[tuple[object, ...], Strategies] = {}

    def run(self, known: Sequence[Plan], seconds: float | None, compared: bool) -> SearchResult:
        start = time.perf_counter()
        end = inf if seconds is None else time.process_time() + seconds
        with _no_garbage():
            self.later = list(self._opened())
            everything = [(entry, entry.strategies) for entry in self.later]
            self.opened = len(everything)
            self._begin_with(known)
            with self._cancelled_at(end):
                self._work_through()
                ranked = sorted(self.found.values(), key=lambda one: one.ms_per_sample)[: self.options.top_k]
                if ranked:
                    fastest = best = ranked[0]
                    step_s = fastest.plan.global_batch / MS_PER_S  # of one ms per sample
                    lower_bound_s, uniform, uniform_bound_s = min(fastest.time_s, self.unproven * step_s), None, None
                    if compared and not self.even and not self.cancel.cancelled:
                        best, uniform, open_ms = self._simpler(fastest, everything)
                        uniform_bound_s = min(uniform.time_s if uniform else inf, open_ms * step_s)
        if not ranked:
            need = None if self.cancel.cancelled else self._need()
            return SearchResult(None, inf, time.perf_counter() - start, self.outcomes, self.bounds_s, need=need)
        family = PlanFamily.of(best.plan)
        others = [other for other in ranked if PlanFamily.of(other.plan) != family]
        return SearchResult(
            best=self._documented(best, lower_bound_s, fastest.time_s),
            lower_bound_s=lower_bound_s,
            search_time_s=time.perf_counter() - start,
            outcomes=self.outcomes,
            bounds_s=self.bounds_s,
            runners_up=tuple(others[: self.options.top_k - 1]),
            fastest=fastest,
            uniform=uniform,
            uniform_bound_s=uniform_bound_s,
        )

    def _simpler(
        self, fastest: Candidate, everything: Iterable[tuple[_OpenFamily, Strategies]]
    ) -> tuple[Candidate, Candidate | None, float]:
        """The simplest plan within the tolerance, and the best one of one strategy with the least bound of what stays
        open, in ms per sample; all of the fastest plan's batch. `everything`: families with all of their strategies:
        one that is beaten for a run of layers may be the best that all runs share."""
        if fastest.strategies == 1:
            return fastest, fastest, self.unproven
        parts = [
            (entry.bound, entry.family, strategies if len(self.runs) > 1 else entry.strategies)
            for entry, strategies in everything
            if entry.family.global_batch == fastest.plan.global_batch
        ]
        uniform, bound = best_uniform(parts, self.cost, self._best_of)
        if not self.options.simplest_within:
            return fastest, uniform, bound
        most_ms = fastest.ms_per_sample * (1 + self.options.simplest_within / 100)
        best = simplest(fastest, parts, uniform, most_ms, self.cost, self._best_of)
        return with_fewer_segments(best, self.cost, self.options.memory_gib * GIB_MIB, most_ms), uniform, bound

    def _best_of(self, parts: Iterable[Part], most_ms: float) -> tuple[Candidate | None, float]:
        """As `simplest.Solve`: with the small effort of a trial."""
        narrow = copy(self)
        narrow.options = self.options.model_copy(update={"top_k": 1})
        narrow.found, narrow.bounds_s, narrow.arrays = {}, {}, {}
        narrow.later, narrow.tried, narrow.too_big, narrow.watch = [], [], [], None
        narrow.outcomes = defaultdict(lambda: FamilyOutcome.NOT_DIVISIBLE)
        narrow.unproven, narrow.most_ms, narrow.log = inf, most_ms, lambda line: None
        narrow._work_on([_OpenFamily(part[0], number, _Bound.COMPUTE, *part[1:]) for number, part in enumerate(parts)])
        for entry in narrow.tried:
            narrow._give_up(entry)
        return min(narrow.found.values(), key=lambda one: one.ms_per_sample, default=None), narrow.unproven

    def _work_through(self) -> None:
        """Solve, reject or give up every family."""
        for most in (1, inf):  # a fast plan without chunks prunes most families of several
            first = [entry for entry in self.later if entry.family.chunks <= most]
            self.later = [entry for entry in self.later if entry.family.chunks > most]
            self._work_on(first)
        tried, self.tried = self.tried, []
        self._work_on(tried)

    def _work_on(self, entries: list[_OpenFamily]) -> None:
        """Advance the most promising family, until none is left."""
        self.waiting = entries
        heapify(self.waiting)
        while self.waiting and not self.cancel.cancelled:
            entry = heappop(self.waiting)
            if self._advance(entry):
                if entry.by is _Bound.TRIAL:
                    self.tried.append(entry)
                else:
                    heappush(self.waiting, entry)
            if self.watch:
                self.watch(self._state())
        for entry in self.waiting:  # where it is cancelled
            self._give_up(entry)

    @contextmanager
    def _cancelled_at(self, end: float) -> Iterator[None]:
        """Limit processor time, so that other programs change no answer."""
        ended, ending = Event(), Lock()

        def cancel() -> None:
            while (left := end - time.process_time()) > 0:
                if ended.wait(left):
                    return
            with ending:
                if not ended.is_set():
                    self.cancel.cancel()

        if end < inf:
            Thread(target=cancel, daemon=True).start()
        try:
            yield
        finally:
            with ending:
                ended.set()

    def _begin_with(self, known: Sequence[Plan]) -> None:
        """Take what is known as found: what cannot beat it need not be solved."""
        for plan in known:
            mine = replace(
                self.bare,
                global_batch=plan.global_batch,
                micro_batches=plan.micro_batches,
                stages=plan.stages,
                layers=plan.layers,
                vocab=plan.vocab,
                schedule=plan.schedule,
                chunks=plan.chunks,
            )
            family = PlanFamily.of(mine)
            if any(each.have(mine, self.cost.layer_types) for each in self.space.get(family, ())):
                candidate = Candidate(mine, self.cost.predict(mine))
                if candidate.fits(self.options.memory_gib * GIB_MIB):
                    self._keep(candidate, family)

    def _opened(self) -> Iterator[_OpenFamily]:
        numbers = count()
        self.space = self._divisible()
        bounds: dict[tuple[PlanFamily, Strategies], float] = {}  # of all that have several chunks the same
        for family, spaces in self.space.items():
            self.outcomes[family] = FamilyOutcome.OUT_OF_MEMORY if spaces else FamilyOutcome.NOT_DIVISIBLE
            if self.cancel.cancelled:  # nothing is known of the others
                self.unproven = 0.0
                return
            for strategies in spaces:
                alike = replace(family, chunks=min(family.chunks, 2)), strategies
                if alike not in bounds:
                    bounds[alike] = compute_bound_ms(family, strategies, self.cost) / family.global_batch
                yield _OpenFamily(bounds[alike], next(numbers), _Bound.COMPUTE, family, strategies)

    def _divisible(self) -> dict[PlanFamily, list[Strategies]]:
        """The strategies of every family. Raises UserError where they are too many."""
        found: dict[PlanFamily, list[Strategies]] = {}
        # By ranks of a stage, samples of a micro-batch, and whether a step has several.
        spaces: dict[tuple[int, int, bool], list[Strategies]] = {}
        total = 0
        asked = self.options, self.cost.world_size, len(self.cost.layer_types)
        for family in (*families(*asked), *interleaved_families(*asked)):
            where = family.stage_size, family.micro_batch, family.micro_batches > 1
            if where not in spaces:
                spaces[where] = self._spaces(family)
            layers = len(self.cost.layer_types)
            found[family] = [one for one in spaces[where] if one.can_divide(family, layers)]
            number = sum(len(some) for strategies in found[family] for some in strategies.layers)
            total += number
            if number > MOST_STRATEGIES:
                raise UserError(
                    f"max_tp_deg: {number} strategies of layers in {family} are more than {MOST_STRATEGIES}; lower "
                    "it or max_cp_deg, or leave tp_consec at 1"
                )
            if len(found) > MOST_FAMILIES or total > MOST_PRICES:
                raise UserError(
                    f"min_bsz, max_bsz, bsz_scale: more than {MOST_FAMILIES} families of plans (batches by "
                    f"micro-batches by stages by schedules), or {MOST_PRICES} strategies in them; take a wider step, "
                    "or give settle_chunk, pipeline_type, max_pp_deg or max_tp_deg"
                )
        return found

    def _spaces(self, family: PlanFamily) -> list[Strategies]:
        """Strategies of each run of layers, and of a vocabulary that suits the first and the last one."""
        of_types = [space.layers(family) for space in self.spaces]
        if self.even:
            return even_spaces(of_types[0], self.spaces[0].vocabularies(family), family, self.even)
        others = set(self.spaces[0].vocabularies(family))
        vocabularies = [vocab for vocab in self.spaces[-1].vocabularies(family) if replace(vocab, pieces=1) in others]
        if self.options.one_strategy:
            mixture = next((number for number, one in enumerate(self.cost.models) if one.experts), 0)
            return [
                made
                for layer in of_types[mixture]
                if vocabularies and all(one in some for one, some in zip(self._alike(layer), of_types, strict=True))
                for made in self._divided([[one] for one in self._alike(layer)], vocabularies, family)
            ]
        return self._divided(of_types, vocabularies, family) if all(of_types) and vocabularies else []

    def _alike(self, layer: LayerStrategy) -> list[LayerStrategy]:
        """One strategy as each layer type has it: without that of experts where there are none."""
        return [layer if model.experts else without_experts(layer) for model in self.cost.models]

    def _divided(
        self, of_types: Sequence[Sequence[LayerStrategy]], vocabularies: Sequence[VocabStrategy], family: PlanFamily
    ) -> list[Strategies]:
        """Strategies of the layers as the core sees them. A few dense layers in front of layers with experts are priced
        with the embedding where the first stage has some of the others, too: the core proves the optimum of layers of
        one type best, and takes chunks of these alone."""
        runs = [of_types[run.layer_type] for run in self.runs]
        if not self.in_front or family.stages == 1:
            return [Strategies(runs, vocabularies)]
        front, count = runs[0], self.in_front
        mixed = len(front) ** count <= MOST_PREFIXES
        prefixes = list(product(front, repeat=count)) if mixed else [(layer,) * count for layer in front]
        alone = Strategies(runs, vocabularies, most_first=count)  # the first stage has dense layers alone
        return [Strategies(runs[1:], vocabularies, prefixes), alone]

    def _state(self) -> SearchState:
        best = max((candidate.samples_per_s for candidate in self.found.values()), default=0.0)
        others = *self.waiting[:1], *self.later, *self.tried
        open_ms = min((entry.bound for entry in others), default=inf)
        least_ms = min(open_ms, self.unproven)
        limit = MS_PER_S / least_ms if least_ms else inf
        still_open = len(self.waiting) + len(self.later) + len(self.tried)
        return SearchState(self.opened, self.opened - still_open, best, max(limit, best))

    def _advance(self, entry: _OpenFamily) -> bool:
        """Bound a family better, or solve it. Whether it is still open."""
        try:
            return self._bounded_or_solved(entry)
        except (galvatron_dp_core.TooHard, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self.cancel.cancelled:  # not the core's word for that
                raise
            self._give_up(entry)
            return False

    def _give_up(self, entry: _OpenFamily) -> None:
        entry.core = None
        if not self._is_beaten(entry):
            self.unproven = min(self.unproven, entry.bound)
            self._note(entry.family, FamilyOutcome.GIVEN_UP)

    def _is_beaten(self, entry: _OpenFamily) -> bool:
        """Whether no plan of the family can be among the best."""
        family = entry.family
        if entry.bound < self._limit(family):
            return False
        self._note(family, FamilyOutcome.OUT_OF_BOUND)
        bound_s = entry.bound * family.global_batch / MS_PER_S
        self.bounds_s[family] = min(self.bounds_s.get(family, inf), bound_s)
        return True

    def _bounded_or_solved(self, entry: _OpenFamily) -> bool:
        family, batch = entry.family, entry.family.global_batch
        if self._is_beaten(entry):
            return False
        limit = self._limit(family)
        if entry.by is _Bound.COMPUTE:
            entry.strategies = self._unbeaten(family, entry.strategies)
            entry.by, bound_ms = _Bound.LAYERS, self._core(entry, layer_arrays).bound(self.cancel)
        elif entry.core is None:
            entry.core = self._core(entry, cost_arrays)
            entry.by, bound_ms = _Bound.PATHS, entry.core.bound(self.cancel)
        elif entry.by is _Bound.PATHS:
            entry.by, bound_ms = _Bound.STAGES, entry.core.tight_bound(limit * batch, self.cancel)
        elif entry.by is _Bound.STAGES:  # most are settled so
            effort = int(self.options.effort * TRIAL_SHARE)
            entry.by, bound_ms = _Bound.TRIAL, self._solve(entry, entry.core, limit, effort)
            if bound_ms == inf:
                return False
        else:
            self._solve(entry, entry.core, limit, self.options.effort, last=True)
            return False
        entry.bound = max(entry.bound, bound_ms / batch)
        if entry.bound == inf:
            entry.core = None
            self.too_big.append(entry)
            return False
        return True

    def _unbeaten(self, family: PlanFamily, strategies: Strategies) -> Strategies:
        """Those that count of a family's strategies. Families that differ in schedule or chunks alone share them."""
        if self.even:
            return strategies
        where = family.micro_batch, family.micro_batches > 1, strategies
        if where not in self.unbeaten:
            self.unbeaten[where] = without_beaten(family, strategies, self.cost)
        return self.unbeaten[where]

    def _core(self, entry: _OpenFamily, price: Callable[[PlanFamily, Strategies, CostModel], CostArrays]) -> AnyCore:
        """The core's object of a family. Families that differ in schedule or chunks alone are priced once."""
        family = entry.family
        if self.even:
            return EvenCore(family, entry.strategies, self.even)
        where = price, family.global_batch, family.micro_batches, family.stages, entry.strategies
        if where not in self.arrays:
            self.arrays[where] = price(family, entry.strategies, self.cost)
        return core_of(family, self.arrays[where], self.options.budget_mib)

    def _solve(self, entry: _OpenFamily, core: AnyCore, limit: float, effort: int, last: bool = False) -> float:
        """Search a family with an effort. Returns its bound in ms, infinite where it is settled."""
        family, batch = entry.family, entry.family.global_batch
        limit_ms = limit * batch
        time_ms, proven_ms, vocab, division, choice = core.solve(limit_ms, effort, self.cancel)
        outcome = FamilyOutcome.SOLVED
        if time_ms < inf:
            plan = entry.strategies.plan(family, vocab, division, choice, self.bare)
            prediction = self.cost.predict(plan)
            self._keep(Candidate(plan, prediction), family)
            time_ms = prediction.time_s * MS_PER_S
        if proven_ms < min(time_ms, limit_ms) * (1 - ROUNDING):
            if not last:
                return proven_ms
            outcome = FamilyOutcome.GIVEN_UP
            self.unproven = min(self.unproven, proven_ms / batch)
        elif family not in self.found:
            outcome = FamilyOutcome.OUT_OF_BOUND if limit < inf else FamilyOutcome.OUT_OF_MEMORY
        if outcome is FamilyOutcome.OUT_OF_BOUND:
            self.bounds_s[family] = min(self.bounds_s.get(family, inf), proven_ms / MS_PER_S)
        if time_ms == inf == limit:
            self.too_big.append(entry)
        self._note(family, outcome)
        self.log(f"{family}: {time_ms:.3f} ms a step, at least {entry.bound * batch:.3f}")
        return inf

    def _keep(self, candidate: Candidate, family: PlanFamily) -> None:
        known = self.found.get(family)
        if known is None or candidate.samples_per_s > known.samples_per_s:
            self.found[family] = candidate

    def _limit(self, family: PlanFamily) -> float:
        """Time per sample, in ms, that a plan of the family must beat to be among the top_k families."""
        others = sorted(one.ms_per_sample for other, one in self.found.items() if other != family)
        limit = others[self.options.top_k - 1] if len(others) >= self.options.top_k else self.most_ms
        mine = self.found.get(family)
        return min(limit, mine.ms_per_sample) if mine else limit

    def _note(self, family: PlanFamily, outcome: FamilyOutcome) -> None:
        self.outcomes[family] = max(self.outcomes[family], outcome)

    def _need(self) -> Need | None:
        """The least memory in which one of the families has a plan; where several chunks a stage fit, one does."""
        least: tuple[float, Plan] | None = None
        for entry in self.too_big:
            if entry.family.chunks > 1:
                continue
            try:
                mib, vocab, division, choice = self._core(entry, cost_arrays).least_memory(self.cancel)
            except RuntimeError:
                if self.cancel.cancelled:
                    return None
                raise
            if mib < (least[0] if least else inf):
                least = mib, entry.strategies.plan(entry.family, vocab, division, choice, self.bare)
        return Need.of(least[1], self.cost).under(self.cost, self.options) if least else None

    def _documented(self, best: Candidate, lower_bound_s: float, fastest_s: float) -> Candidate:
        metadata = {
            "predicted": predicted(best.prediction, lower_bound_s, fastest_s),
            "searched_from": {
                "model": self.models[0].name,
                "model_fingerprint": joint_fingerprint(self.models),
                "num_nodes": self.cost.num_nodes,
                "num_gpus_per_node": self.cost.gpus_per_node,
                "memory_constraint_gb": self.options.memory_gib,
                "device": self.cost.device.model_dump(exclude_none=True),
                "profiles": [file.summary() for file in self.cost.profile_files],
                "options": self.options.model_dump(mode="json", exclude_unset=True)
                | (self.cost.load._asdict() if self.cost.load else {}),
            },
        }
        return Candidate(replace(best.plan, metadata=metadata), best.prediction)


def predicted(prediction: Prediction, lower_bound_s: float, fastest_s: float | None = None) -> dict[str, Any]:
    """The strategy file's "predicted": step time, certificate, and each stage's times and memory. `fastest_s`: of the
    plan that the certificate is of; None: this one."""
    return {
        "time_s": prediction.time_s,
        "lower_bound_s": lower_bound_s,
        "gap": max(0.0, 1 - lower_bound_s / (fastest_s or prediction.time_s)),
        "samples_per_s": prediction.samples_per_s,
        "stages": [asdict(stage) | {"memory_mib": stage.memory.total_mib} for stage in prediction.stages],
    }


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Prices are kept by the ten thousand, and none is part of a cycle: to look for cycles among them again and again
    takes a third of the time."""
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked_for:
            gc.enable()


def _require_agreement(models: Sequence[ModelShape], cost: CostModel, options: SearchOptions) -> None:
    faults = []
    if options.trainer != "galvatron" and len(cost.models) > 1:
        faults.append(f"trainer: {options.trainer} has one type of layers, the model {len(cost.models)}; leave it out")
    if models != cost.given:
        faults.append("model: it is not that of the cost model; make them agree")
    asked = options.assumptions
    faults += [
        f"{name}: {theirs}, but {ours} in the cost model; make them agree"
        for name, ours, theirs in cost.assumed.completed(asked).unlike(asked.completed(cost.assumed))
    ]
    if (cost.num_nodes, cost.gpus_per_node) != (options.num_nodes, options.num_gpus_per_node):
        faults.append(
            f"num_nodes, num_gpus_per_node: {options.num_nodes} x {options.num_gpus_per_node}, but the cost model is "
            f"of {cost.num_nodes} x {cost.gpus_per_node}; make them agree"
        )
    if cost.context_mib != options.reserve_mib:
        faults.append(f"context_mib: {options.reserve_mib}, but {cost.context_mib} in the cost model; make them agree")
    if cost.task != options.trained:
        faults.append(f"task: {options.trained}, but {cost.task} in the cost model; make them agree")
    if faults:
        raise UserError(faults)
