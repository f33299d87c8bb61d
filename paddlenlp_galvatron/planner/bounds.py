"""Lower bounds of a family's step time, in order of rising cost and tightness, and its exact solution.

Every family starts with the first bound, by its fastest strategies (`core_arrays.compute_bound_ms`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from galvatron_dp_core import Cancel

from ..cost_model import CostModel
from .branches import Branches
from .core_arrays import Core, CostArrays, TooWide, core_of, cost_arrays, layer_arrays, without_beaten
from .space import PlanFamily, Strategies

if TYPE_CHECKING:
    from .even import EvenCore

AnyCore: TypeAlias = "Core | EvenCore"
# Limits of a family's strategies of layers: to compare with each other, and in the core.
MOST_COMPARED, MOST_STRATEGIES = 5_000, 2_000
Price = Callable[[PlanFamily, Strategies, CostModel], CostArrays]


class Phase(IntEnum):
    """The phase in which a family is searched."""

    CHUNKS = 0  # a fast plan with several chunks prunes most families with one
    ONE_CHUNK = 1
    HARD = 2  # a search with a small effort left it open

    @classmethod
    def first(cls, family: PlanFamily) -> Phase:
        return cls.CHUNKS if family.chunks > 1 else cls.ONE_CHUNK


@dataclass(order=True, slots=True)
class OpenFamily:
    """A family that is not solved yet (with one strategy for all layers: one of its strategies)."""

    bound: float  # ms per sample
    number: int  # order among equal bounds
    family: PlanFamily = field(compare=False)
    strategies: Strategies = field(compare=False)
    phase: Phase = field(compare=False, default=Phase.ONE_CHUNK)
    bounded: int = field(compare=False, default=0)  # number of BOUNDS that it has
    core: AnyCore | None = field(compare=False, default=None)

    @property
    def part(self) -> tuple[float, PlanFamily, Strategies]:
        """Its part of the space with its current bound."""
        return self.bound, self.family, self.strategies


class Cores:
    """Makes the core's objects of families; families that differ only in schedule or chunks are priced once."""

    def __init__(self, branches: Branches, cost: CostModel, budget_mib: float, cancel: Cancel):
        self.cancel = cancel
        self.even, self._cost, self._budget_mib = branches.even, cost, budget_mib
        self._arrays: dict[tuple[object, ...], CostArrays] = {}
        self._unbeaten: dict[tuple[object, ...], Strategies] = {}
        self.too_wide: set[PlanFamily] = set()  # families with too many strategies, left at their first bound

    def unbeaten(self, family: PlanFamily, strategies: Strategies) -> Strategies:
        """Strategies that no other strategy dominates. Raises TooWide for too many."""
        if self.even:
            return strategies
        _require(family, strategies, MOST_COMPARED)
        where = family.micro_batch, family.micro_batches > 1, strategies
        if where not in self._unbeaten:
            self._unbeaten[where] = without_beaten(family, strategies, self._cost)
        _require(family, self._unbeaten[where], MOST_STRATEGIES)
        return self._unbeaten[where]

    def core(self, entry: OpenFamily, price: Price = cost_arrays) -> AnyCore:
        """The core's object of a family."""
        family = entry.family
        if self.even:
            entry.core = entry.core or self.even.core(family, entry.strategies)
            return entry.core
        where = price, family.global_batch, family.micro_batches, family.stages, entry.strategies
        if where not in self._arrays:
            self._arrays[where] = price(family, entry.strategies, self._cost)
        return core_of(family, self._arrays[where], self._budget_mib)


def _require(family: PlanFamily, strategies: Strategies, most: int) -> None:
    if sum(map(len, strategies.layers)) > most:
        raise TooWide(f"{family} has more than {most} strategies of layers")


def layers_ms(entry: OpenFamily, cores: Cores, limit_ms: float) -> float:
    """Bound of the layers' strategies alone, within the memory budget."""
    if not entry.strategies.alike:  # with a single strategy this cheaper bound rejects most families
        entry.strategies = cores.unbeaten(entry.family, entry.strategies)
    return cores.core(entry, layer_arrays).bound(cores.cancel)


def paths_ms(entry: OpenFamily, cores: Cores, limit_ms: float) -> float:
    """Bound of a fixed set of critical paths of the schedule."""
    if entry.strategies.alike:
        entry.strategies = cores.unbeaten(entry.family, entry.strategies)
    entry.core = cores.core(entry)
    return entry.core.bound(cores.cancel)


def stages_ms(entry: OpenFamily, cores: Cores, limit_ms: float) -> float:
    """Bound of the exact optima of stages, computed only until it passes the limit."""
    assert entry.core
    return entry.core.tight_bound(limit_ms, cores.cancel)


BOUNDS = (layers_ms, paths_ms, stages_ms)
