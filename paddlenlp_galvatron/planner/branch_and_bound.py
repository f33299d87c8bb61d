"""Best-first branch and bound over families of plans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain
from math import inf

import galvatron_dp_core

from ..base.units import GIB_MIB, MS_PER_S
from ..cost_model import CostModel
from ..plan import Plan, even_stages
from .bounds import BOUNDS, Cores, OpenFamily, Phase
from .core_arrays import TooWide
from .options import SearchOptions
from .result import ROUNDING, Candidate, FamilyOutcome
from .space import PlanFamily

TRIAL_SHARE = 1 / 64  # share of the effort for a first trial of every family
START_SHARE = 1 / 16  # share of the effort, for each plan of one strategy
MOST_TRIALS, MOST_STARTS = 16, 4  # of families with several chunks that no option requests; of plans for each


@dataclass(frozen=True, slots=True)
class SearchState:
    """Progress of a search."""

    families: int
    done: int
    best: float  # samples/s of the best plan so far; 0: none yet
    limit: float  # samples/s that no plan beats; infinite: not known yet


Watch = Callable[[SearchState], None]
# A first plan of a family that takes less than this many ms per sample; None: none is known.
Start = Callable[[OpenFamily, float], Candidate | None]


@dataclass
class Incumbents:
    """The fastest plan of each family, and bounds of families without a plan. Times per sample."""

    top_k: int  # families whose plans are wanted
    most_ms: float = inf  # only faster plans are wanted
    gap: float = 0.0  # share of a known plan's time by which others must beat it
    found: dict[PlanFamily, Candidate] = field(default_factory=dict)
    outcomes: dict[PlanFamily, FamilyOutcome] = field(default_factory=dict)
    bounds_s: dict[PlanFamily, float] = field(default_factory=dict)  # step bounds of families that cannot win
    unproven_ms: float = inf  # lowest bound of families that were given up, or rejected within the gap
    left_out_ms: float = inf  # the same for families that the proof excludes

    @property
    def ranked(self) -> list[Candidate]:
        """The fastest plans, one a family."""
        return sorted(self.found.values(), key=lambda incumbent: incumbent.ms_per_sample)[: self.top_k]

    def offer(self, candidate: Candidate, family: PlanFamily) -> None:
        """Keep a plan that is faster than its family's best."""
        incumbent = self.found.get(family)
        if incumbent is None or candidate.samples_per_s > incumbent.samples_per_s:
            self.found[family] = candidate

    def limit_ms(self, family: PlanFamily) -> float:
        """The time that a plan of the family must beat to be among the top_k families."""
        others = sorted(incumbent.ms_per_sample for other, incumbent in self.found.items() if other != family)
        limit = others[self.top_k - 1] if len(others) >= self.top_k else self.most_ms
        mine = self.found.get(family)
        return min(limit, mine.ms_per_sample) if mine else limit

    def wanted_ms(self, family: PlanFamily) -> float:
        """The time below which a plan of the family is searched: the limit less the gap."""
        return self.limit_ms(family) * (1 - self.gap)

    def note(self, family: PlanFamily, outcome: FamilyOutcome) -> None:
        """Keep the furthest outcome of a family."""
        self.outcomes[family] = max(self.outcomes.get(family, outcome), outcome)

    def prove(self, family: PlanFamily, bound_ms: float) -> None:
        """Keep the lower bound of an abandoned family: below the limit it weakens the proof."""
        if bound_ms < self.limit_ms(family) * (1 - ROUNDING):
            self.unproven_ms = min(self.unproven_ms, bound_ms)

    def reject(self, family: PlanFamily, step_ms: float) -> None:
        """Reject a family whose steps take at least `step_ms`: the gap covers what it could save."""
        self.note(family, FamilyOutcome.OUT_OF_BOUND)
        self.prove(family, step_ms / family.global_batch)
        self.bounds_s[family] = min(self.bounds_s.get(family, inf), step_ms / MS_PER_S)

    def give_up(self, family: PlanFamily, bound_ms: float) -> None:
        """Leave a family unsolved: its bound weakens the proof."""
        if bound_ms >= self.wanted_ms(family):
            self.reject(family, bound_ms * family.global_batch)
        else:
            self.prove(family, bound_ms)
            self.note(family, FamilyOutcome.GIVEN_UP)

    def leave_out(self, family: PlanFamily, bound_ms: float) -> None:
        """Leave a family with several chunks that no option requests: the proof excludes it."""
        self.note(family, FamilyOutcome.LEFT_OUT)
        self.left_out_ms = min(self.left_out_ms, bound_ms)


class BranchAndBound:
    """Takes the open family with the lowest bound and tightens its bound or solves it, until none is open."""

    def __init__(
        self,
        cores: Cores,
        cost: CostModel,
        options: SearchOptions,
        bare: Plan,
        best: Incumbents,
        start: Start | None = None,
        trials: int | None = None,
    ):
        """`trials`: number of short trials of families with several chunks, which the proof then excludes; None: all
        are searched to the end."""
        self.best, self._start, self._trials = best, start, trials
        self.too_big: list[OpenFamily] = []  # families that do not fit
        self.cores, self._cost, self._effort, self._bare = cores, cost, options.effort, bare
        self._trial_effort = int(options.effort * (TRIAL_SHARE if start else START_SHARE))
        self._device_mib = options.memory_gib * GIB_MIB
        self._open: dict[Phase, list[OpenFamily]] = {phase: [] for phase in Phase}  # heaps

    def run(
        self,
        families: Iterable[OpenFamily],
        log: Callable[[str], None] | None = None,
        watch: Watch | None = None,
        last: Phase = Phase.HARD,
    ) -> None:
        """Solve, reject or give up every family. Those are given up that are open after the last phase, or when the
        search is cancelled."""
        cancel = self.cores.cancel
        for entry in families:
            heappush(self._open[entry.phase], entry)
        number = sum(map(len, self._open.values()))
        for phase, waiting in self._open.items():
            self._interleave()
            while phase <= last and waiting and not cancel.cancelled:
                entry = heappop(waiting)
                if self._advance(entry, log):
                    heappush(self._open[entry.phase], entry)
                if watch:
                    watch(self._state(number))
        for entry in chain(*self._open.values()):
            self.best.give_up(entry.family, entry.bound)

    def _interleave(self) -> None:
        """Give open families with several chunks a first plan: the known plan with one chunk, divided further."""
        for entry in chain(*self._open.values()):
            family, plain = entry.family, self.best.found.get(replace(entry.family, chunks=1))
            if plain and family.chunks > 1 and family not in self.best.found and not self.cores.even:
                stages = even_stages(len(plain.plan.layers), family.stages * family.chunks)
                plan = replace(plain.plan, stages=stages, chunks=family.chunks)
                candidate = Candidate(plan, self._cost.predict(plan))
                if entry.strategies.have(plan, self._cost.layer_types) and candidate.fits(self._device_mib):
                    self.best.offer(candidate, family)

    def _advance(self, entry: OpenFamily, log: Callable[[str], None] | None) -> bool:
        """Tighten a family's bound or solve it. Returns whether it is still open."""
        family, batch = entry.family, entry.family.global_batch
        limit_ms = (self.best.wanted_ms if entry.phase is Phase.HARD else self.best.limit_ms)(family)
        if entry.bound >= limit_ms:
            self.best.reject(family, entry.bound * batch)
            return False
        if family.chunks > 1 and self._trials is not None and (entry.phase is Phase.HARD or not self._trials):
            self.best.leave_out(family, entry.bound)
            return False
        try:
            # With several chunks the last bound takes longer than a trial, which may settle the family.
            if entry.bounded < len(BOUNDS) - (entry.phase is Phase.CHUNKS):
                bound_ms = BOUNDS[entry.bounded](entry, self.cores, limit_ms * batch)
                entry.bounded += 1
            else:
                if entry.phase is Phase.CHUNKS and self._start and (begun := self._start(entry, limit_ms)):
                    self.best.offer(begun, family)
                    limit_ms = self.best.limit_ms(family)
                proven_ms = self._solve(entry, limit_ms * batch, log)
                if proven_ms is None:
                    return False
                entry.phase, bound_ms = Phase.HARD, proven_ms
        except (galvatron_dp_core.TooHard, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self.cores.cancel.cancelled:  # unless the core was stopped
                raise
            if isinstance(error, TooWide):
                self.cores.too_wide.add(family)
            entry.core = None
            self.best.give_up(family, entry.bound)
            return False
        entry.bound = max(entry.bound, bound_ms / batch)
        if entry.bound == inf:
            entry.core = None
            self.too_big.append(entry)
        return entry.bound < inf

    def _solve(self, entry: OpenFamily, limit_ms: float, log: Callable[[str], None] | None) -> float | None:
        """Search a family, with a small effort at first. Returns its bound in ms; None: it is settled."""
        family, best, last = entry.family, self.best, entry.phase is Phase.HARD
        assert entry.core
        if family.chunks > 1 and self._trials:
            self._trials -= 1
        # A family that a trial settles is proven without a gap, at little cost.
        effort, gap = (self._effort, best.gap) if last else (self._trial_effort, 0.0)
        time_ms, proven_ms, vocab, division, choice = entry.core.solve(limit_ms, effort, self.cores.cancel, gap)
        outcome = FamilyOutcome.SOLVED
        if time_ms < inf:
            plan = entry.strategies.plan(family, vocab, division, choice, self._bare)
            candidate = Candidate(plan, self._cost.predict(plan))
            best.offer(candidate, family)
            time_ms = candidate.time_s * MS_PER_S
        settled = proven_ms >= min(time_ms * (1 - gap), limit_ms) * (1 - ROUNDING)
        if not settled and not last:
            return proven_ms
        best.prove(family, proven_ms / family.global_batch)
        if not settled:
            outcome = FamilyOutcome.GIVEN_UP
        elif family not in best.found:
            outcome = FamilyOutcome.OUT_OF_BOUND if limit_ms < inf else FamilyOutcome.OUT_OF_MEMORY
        if outcome is FamilyOutcome.OUT_OF_BOUND:
            best.reject(family, proven_ms)
        if time_ms == inf == limit_ms:
            self.too_big.append(entry)
        best.note(family, outcome)
        if log:
            log(f"{family}: {time_ms:.3f} ms a step, at least {entry.bound * family.global_batch:.3f}")
        return None

    def _state(self, families: int) -> SearchState:
        best = max((candidate.samples_per_s for candidate in self.best.found.values()), default=0.0)
        heaps = [heap for heap in self._open.values() if heap]
        least_ms = min([self.best.unproven_ms, *(heap[0].bound for heap in heaps)])
        limit = MS_PER_S / least_ms if least_ms else inf
        return SearchState(families, families - sum(map(len, heaps)), best, max(limit, best))
