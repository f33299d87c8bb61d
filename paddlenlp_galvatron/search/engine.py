"""The search itself: families in order of their lower bounds, each solved exactly, until no bound is below the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import galvatron_dp_core

from ..cost_model import CostModel, Prediction
from ..plan import LayerStrategy, ModelShape, Plan, UserError, VocabStrategy
from .options import SearchOptions
from .result import Candidate, Need, Outcome, SearchResult
from .space import Family, Space, families
from .tables import Tables, build

MS_PER_S = 1000.0


def search(
    model: ModelShape,
    cost: CostModel,
    options: SearchOptions = SearchOptions(),
    log: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the plan of least predicted time per sample (`cost.predict`), with its lower bound.

    The plan's metadata say what is predicted and what it was searched from. `log` takes one line a family. Raises
    UserError where the options contradict the cost model, or a profile lacks what a strategy needs.
    """
    _require_agreement(cost, options)
    return _Search(model, cost, options, log or (lambda line: None)).run()


@dataclass(frozen=True, slots=True)
class _Open:
    """A family to be searched (with one strategy for all layers: one of its strategies)."""

    tables: Tables
    bound: float  # ms per sample


class _Search:
    def __init__(self, model: ModelShape, cost: CostModel, options: SearchOptions, log: Callable[[str], None]):
        self.model, self.cost, self.options, self.log = model, cost, options, log
        self.space = Space(model, cost.assumed, options)
        self.bare = Plan(
            world_size=cost.world_size,
            global_batch=1,
            micro_batches=1,
            stages=(),
            layers=(),
            default_dp_type=options.default_dp_type,
            assumed=cost.assumed,
        )
        self.cancel = galvatron_dp_core.Cancel()
        self.found: dict[Family, Candidate] = {}
        self.outcomes: dict[Family, Outcome] = {}
        self.unproven = inf  # ms per sample: least lower bound of the families that were given up

    def run(self) -> SearchResult:
        start = time.perf_counter()
        waiting = sorted(self._bounded(), key=lambda entry: entry.bound)
        if self.options.parallel_search:
            self._solve_in_threads(waiting)
        else:
            for entry in waiting:
                self._solve(entry)
        ranked = sorted(self.found.values(), key=lambda candidate: -candidate.samples_per_s)[: self.options.top_k]
        lower_bound_s = inf
        if ranked:
            batch = ranked[0].plan.global_batch
            lower_bound_s = min(ranked[0].time_s, self.unproven * batch / MS_PER_S)
            ranked[0] = self._documented(ranked[0], lower_bound_s)
        return SearchResult(
            best=ranked[0] if ranked else None,
            lower_bound_s=lower_bound_s,
            search_time_s=time.perf_counter() - start,
            outcomes=self.outcomes,
            runners_up=tuple(ranked[1:]),
            need=None if ranked else self._need(waiting),
        )

    def _bounded(self) -> Iterator[_Open]:
        budget_mib = self.options.budget_mib
        for family in families(self.options, self.cost.world_size, len(self.cost.layer_types)):
            spaces = self._spaces(family)
            self.outcomes[family] = Outcome.OUT_OF_MEMORY if spaces else Outcome.NOT_DIVISIBLE
            for layers, vocabularies in spaces:
                tables = build(family, layers, vocabularies, self.cost, budget_mib)
                yield _Open(tables, tables.core.bound(self.cancel) / family.global_batch)

    def _spaces(self, family: Family) -> list[tuple[Sequence[LayerStrategy], Sequence[VocabStrategy]]]:
        if self.options.one_strategy:
            return [([layer], [vocab]) for layer, vocab in self.space.uniform(family)]
        layers, vocabularies = self.space.layers(family), self.space.vocabularies(family)
        return [(layers, vocabularies)] if layers and vocabularies else []

    def _limit(self, family: Family) -> float:
        """Time per sample, in ms, that a plan of the family must beat to be kept."""
        limits = sorted(MS_PER_S / found.samples_per_s for other, found in self.found.items() if other != family)
        mine = self.found.get(family)
        own = MS_PER_S / mine.samples_per_s if mine else inf
        return min(own, limits[self.options.top_k - 1] if len(limits) >= self.options.top_k else inf)

    def _solve(self, entry: _Open) -> None:
        family, core = entry.tables.family, entry.tables.core
        if entry.bound == inf:
            return
        limit = self._limit(family)
        if entry.bound >= limit:
            self._note(family, Outcome.OUT_OF_BOUND)
            return
        batch = family.global_batch
        time_ms, proven_ms, vocab, division, choice = core.solve(limit * batch, self.options.most_nodes, self.cancel)
        if time_ms < inf:
            plan = entry.tables.plan(vocab, division, choice, self.bare)
            self.found[family] = Candidate(plan, self.cost.predict(plan))
            self._note(family, Outcome.SOLVED)
        elif limit < inf:
            self._note(family, Outcome.OUT_OF_BOUND)
        if proven_ms < min(time_ms, limit * batch):
            self.unproven = min(self.unproven, proven_ms / batch)
            self._note(family, Outcome.GIVEN_UP)
        self.log(f"{family}: {time_ms:.3f} ms a step, at least {entry.bound * batch:.3f}")

    def _note(self, family: Family, outcome: Outcome) -> None:
        self.outcomes[family] = max(self.outcomes[family], outcome)

    def _solve_in_threads(self, waiting: Sequence[_Open]) -> None:
        with ThreadPoolExecutor(self.options.worker) as pool:
            jobs = [pool.submit(self._solve, entry) for entry in waiting]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                self.cancel.cancel()
                pool.shutdown(cancel_futures=True)
                raise

    def _need(self, families: Sequence[_Open]) -> Need | None:
        """The least memory in which one of the families has a plan."""
        needs = []
        for tables in (entry.tables for entry in families):
            _, vocab, division, strategies = tables.core.least_memory()
            choice = [k for k, length in zip(strategies, division, strict=True) for _ in range(length)]
            plan = tables.plan(vocab, division, choice, self.bare)
            needs.append(Need(plan, self.cost.predict(plan)))
        return min(needs, key=lambda need: need.memory_mib, default=None)

    def _documented(self, best: Candidate, lower_bound_s: float) -> Candidate:
        metadata = {
            "predicted": predicted(best.prediction, lower_bound_s),
            "searched_from": {
                "model": self.model.name,
                "model_fingerprint": self.model.fingerprint,
                "num_nodes": self.cost.num_nodes,
                "num_gpus_per_node": self.cost.gpus_per_node,
                "memory_constraint_gb": self.options.memory_constraint,
            },
        }
        return Candidate(replace(best.plan, metadata=metadata), best.prediction)


def predicted(prediction: Prediction, lower_bound_s: float) -> dict[str, Any]:
    """The strategy file's "predicted": step time, certificate, and each stage's times and memory."""
    return {
        "time_s": prediction.time_s,
        "lower_bound_s": lower_bound_s,
        "gap": max(0.0, 1 - lower_bound_s / prediction.time_s),
        "samples_per_s": prediction.samples_per_s,
        "stages": [
            asdict(stage) | {"memory": asdict(stage.memory) | {"total_mib": stage.memory.total_mib}}
            for stage in prediction.stages
        ],
    }


def _require_agreement(cost: CostModel, options: SearchOptions) -> None:
    faults = []
    if cost.assumed != options.assumptions:
        faults.append(f"the cost model assumes {cost.assumed}, the options say {options.assumptions}; make them agree")
    if (cost.num_nodes, cost.gpus_per_node) != (options.num_nodes, options.num_gpus_per_node):
        faults.append(
            f"num_nodes, num_gpus_per_node: {options.num_nodes} x {options.num_gpus_per_node}, but the cost model is "
            f"of {cost.num_nodes} x {cost.gpus_per_node}; make them agree"
        )
    if cost.context_mib != options.context_mib:
        faults.append(f"context_mib: {options.context_mib}, but {cost.context_mib} in the cost model; make them agree")
    if faults:
        raise UserError(faults)
