"""The stage problem by itself: one strategy for each layer of a chain, least time within a memory budget, exactly.

Label setting with Lagrangian bounds. A label is the memory and time of strategies for the first layers; of those that
end in the same strategy only labels stay that no other one beats in both (`_Chain.search`). Where memory has a price,
a backward pass finds the cheapest completion of every layer and strategy (`_Chain.completions`); a label is dropped if
that exceeds the budget or a guess of the optimum, which rises from the lower bound until a solution takes less
(`_Chain.solve`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

SMALLEST, LARGEST = 1e-60, 1e60  # of numbers but 0: sums, products and quotients neither overflow nor vanish
MOST_LAYERS, MOST_STRATEGIES, MOST_ENTRIES = 100_000, 2_000, 5_000_000
MOST_LABELS = 5_000_000  # some 200 MB
ROUNDING = 1e-12  # relative: of sums
FIRST_GUESS, GROWTH = 1e-6, 8.0  # of the optimum beyond its bound, relative; of the next guess
MOST_PRICES = 100  # of memory that are tried; a few are enough

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Solution:
    """Best strategies of a chain of layers."""

    time_s: float  # infinite where nothing fits
    choice: tuple[int, ...]  # strategy of each layer; empty where nothing fits
    memory_mib: float  # of the choice; where nothing fits, the least that would do
    lower_bound_s: float  # no choice takes less time


def solve(
    memory_mib: ArrayLike, time_s: ArrayLike, switch_s: ArrayLike, budget_mib: float, gap: float = 0.0
) -> Solution:
    """Choose a strategy k_l for every layer l: least Σ time_s[l, k_l] + Σ switch_s[l, k_(l-1), k_l], where
    Σ memory_mib[l, k_l] ≤ budget_mib.

    `memory_mib` and `time_s` have shape [L, K] for L layers and K strategies; `switch_s` has shape [K, K] (before,
    after), or [L, K, K] where it differs by layer: switch_s[l] is paid on entering layer l, and switch_s[0] not at all.
    An infinite entry forbids a choice. Sums are trusted to a relative 1e-12.

    The result is the optimum, or with `gap` (a fraction below 1) a solution proven to take at most 1 / (1 - gap) times
    the optimum. Raises ValueError for shapes that do not match, empty tables, more than 100,000 layers, 2000 strategies
    or 5,000,000 entries, NaN, negative numbers, and numbers below 1e-60 (but 0) or above 1e60; MemoryError where layers
    that all differ make the optimum too hard: allow a gap, or a wider one.
    """
    memory = _table("memory_mib", memory_mib)
    if memory.ndim != 2 or not memory.size:
        raise ValueError(f"memory_mib: has shape {[*memory.shape]}; give [layers, strategies], neither of them 0")
    layers, strategies = memory.shape
    if layers > MOST_LAYERS or strategies > MOST_STRATEGIES or memory.size > MOST_ENTRIES:
        raise ValueError(
            f"memory_mib: has shape {[*memory.shape]}; at most 100000 layers, 2000 strategies, and 5000000 entries"
        )
    time, switch = _table("time_s", time_s), _table("switch_s", switch_s)
    square = (strategies, strategies)
    for name, table, shape in (
        ("time_s", time, memory.shape),
        ("switch_s", switch, (layers, *square) if switch.ndim == 3 else square),
    ):
        if table.shape != shape:
            raise ValueError(f"{name}: has shape {[*table.shape]}; give {[*shape]}")
    for name, table in (("memory_mib", memory), ("time_s", time), ("switch_s", switch)):
        _check(name, table)
    budget, allowed = _number("budget_mib", budget_mib), _number("gap", gap)
    if allowed >= 1:
        raise ValueError("gap: is not below 1")
    return _Chain(memory, time, switch, budget).solve(allowed)


@dataclass(frozen=True, slots=True)
class _Completions:
    """The cheapest choice of the layers from l on, if layer l - 1 has strategy k and memory has a price; [L + 1, K]."""

    price: float  # s per MiB; infinite: only memory counts
    time: Numbers
    memory: Numbers
    following: NDArray[np.int16]  # strategy of layer l

    def priced(self, layer: int) -> Numbers:
        time = self.time[layer]
        return np.asarray(time + self.price * self.memory[layer] if self.price else time)


class _Chain:
    def __init__(self, memory: Numbers, time: Numbers, switch: Numbers, budget: float):
        allowed = np.isfinite(memory) & np.isfinite(time)
        self.memory, self.time = np.where(allowed, memory, inf), np.where(allowed, time, inf)
        self.switch, self.budget = switch, budget * (1 + ROUNDING)
        self.bound, self.best = 0.0, Solution(inf, (), inf, inf)
        self.accepted, self.worthwhile = 1.0, 0.0  # share of a solution, and time of a label, that may be given away
        self.prices: list[_Completions] = []

    def solve(self, gap: float) -> Solution:
        self.least = self.completions(inf)
        if not self.least.memory[0, 0] <= self.budget:
            return Solution(inf, (), float(self.least.memory[0, 0]), inf)
        self.take(self.least)
        self.raise_bound()
        # Half of the gap lets labels be dropped that are hardly better than another one, the other half ends the search
        # early. Where nothing is found below a guess, the guess is a bound.
        self.accepted, dropped = 1 - gap / 2, gap / 2 * self.bound
        self.worthwhile = dropped / len(self.time)
        guess, proven = FIRST_GUESS, False  # a guess above the best solution leaves nothing to be found
        while not proven and _is_less(self.bound, self.best.time_s * (1 - gap)):
            limit = self.bound + guess * max(self.bound, self.best.time_s - self.bound)
            proven = not limit < self.best.time_s * self.accepted
            self.search(limit)
            self.bound = max(self.bound, min(limit, self.best.time_s * self.accepted) - dropped)
            guess *= GROWTH
        best = self.best
        return Solution(best.time_s, best.choice, best.memory_mib, min(self.bound, best.time_s))

    def entering(self, layer: int) -> Numbers:
        """Time of each change in front of a layer; [K, K]."""
        if layer == 0:
            return np.zeros(self.switch.shape[-2:])
        return self.switch[layer] if self.switch.ndim == 3 else self.switch

    def completions(self, price: float) -> _Completions:
        layers, strategies = self.time.shape
        time, memory = np.zeros((layers + 1, strategies)), np.zeros((layers + 1, strategies))
        following = np.zeros((layers + 1, strategies), dtype=np.int16)
        rows = np.arange(strategies)
        for layer in reversed(range(layers)):
            times = self.entering(layer) + (self.time[layer] + time[layer + 1])
            memories = self.memory[layer] + memory[layer + 1]
            priced = np.where(np.isfinite(times), memories, inf) if price == inf else times
            if 0 < price < inf:
                priced = times + price * memories
            chosen = following[layer] = priced.argmin(axis=1)
            time[layer] = times[rows, chosen]
            memory[layer] = np.where(np.isfinite(time[layer]), memories[chosen], inf)
        return _Completions(price, time, memory, following)

    def raise_bound(self) -> None:
        """Find the best price of memory: cross the line of the cheapest solution that fits with that of the cheapest
        that does not."""
        high_s, high_mib = self.least.time[0, 0], self.least.memory[0, 0]
        now, price = self.completions(0.0), 0.0
        self.take(now)
        low_s, low_mib = now.time[0, 0], now.memory[0, 0]
        for _ in range(MOST_PRICES):
            if not (low_mib > max(self.budget, high_mib) and high_s > low_s):
                break
            price = (high_s - low_s) / (low_mib - high_mib)
            now = self.completions(price)
            self.take(now)
            spent_s, used_mib = now.time[0, 0], now.memory[0, 0]
            if not _is_less(now.priced(0)[0], low_s + price * low_mib) or not high_mib < used_mib < low_mib:
                break
            if used_mib <= self.budget:
                high_s, high_mib = spent_s, used_mib
            else:
                low_s, low_mib = spent_s, used_mib
        self.prices = [self.completions(factor * price) for factor in ((1.0, 0.8, 1.25, 0.0) if price else (0.0,))]

    def take(self, go: _Completions) -> None:
        """Take the bound that a price gives, and its solution where that fits."""
        if go.price < inf:
            self.bound = max(self.bound, float(go.priced(0)[0]) - (go.price and go.price * self.budget))
        self.complete([], 0.0, 0.0, go)

    def complete(self, choice: list[int], memory: float, time: float, go: _Completions) -> None:
        """Take the first strategies with their completion as the best solution, if that fits and takes less."""
        last = choice[-1] if choice else 0
        memory, time = memory + go.memory[len(choice), last], time + go.time[len(choice), last]
        if memory <= self.budget and time < self.best.time_s:
            for layer in range(len(choice), len(self.time)):
                choice.append(int(go.following[layer, choice[-1] if choice else 0]))
            self.best = Solution(float(time), tuple(choice), float(memory), inf)

    def search(self, limit: float) -> None:
        """Find the optimum if it takes less than the limit."""
        memory, time, last = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64)
        labels: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # of each layer: label before, strategy
        total = 0
        for layer in range(len(self.time)):
            total += len(last)
            if total + len(last) * self.time.shape[1] > MOST_LABELS:
                raise MemoryError("the search would take too much memory; allow a gap, or give fewer layers")
            used = memory[:, None] + self.memory[layer]
            spent = time[:, None] + self.entering(layer)[last] + self.time[layer]
            promising = (used + self.least.memory[layer + 1] <= self.budget) & np.isfinite(spent)
            limit = min(limit, self.best.time_s * self.accepted)
            for go in self.prices:
                slack = go.price * (self.budget - used) if go.price else 0.0
                promising &= spent + go.priced(layer + 1) - slack < limit * (1 - ROUNDING)
            before, strategy = np.nonzero(promising)
            used, spent = used[before, strategy], spent[before, strategy]
            kept = _unbeaten(strategy, used, spent, self.worthwhile)
            if not len(kept):
                return
            memory, time, last = used[kept], spent[kept], strategy[kept]
            labels.append((before[kept], last))
            for go in self.prices:
                fits = memory + go.memory[layer + 1, last] <= self.budget
                whole = np.where(fits, time + go.time[layer + 1, last], inf)
                at = int(whole.argmin())
                if whole[at] < self.best.time_s:
                    self.complete(_choice(labels, at), float(memory[at]), float(time[at]), go)


def _choice(labels: list[tuple[NDArray[np.int64], NDArray[np.int64]]], at: int) -> list[int]:
    """Strategies of the first layers, of one of the last labels."""
    choice = []
    for before, strategy in reversed(labels):
        choice.append(int(strategy[at]))
        at = int(before[at])
    return choice[::-1]


def _unbeaten(strategy: NDArray[np.int64], memory: Numbers, time: Numbers, worthwhile: float) -> NDArray[np.int64]:
    """Labels that no other one of their strategy beats: of less or equal memory, in time, or hardly longer."""
    steps = np.floor(time / worthwhile) if worthwhile else time
    order = np.lexsort((time, memory, strategy))
    kept = [order[:0]]
    for some in np.split(order, np.flatnonzero(np.diff(strategy[order])) + 1):
        before = np.minimum.accumulate(steps[some])
        kept.append(some[steps[some] < np.concatenate(([inf], before[:-1]))])
    return np.concatenate(kept)


def _is_less(a: float, b: float) -> bool:
    return a < b * (1 - ROUNDING)


def _table(name: str, values: ArrayLike) -> Numbers:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: is no table of numbers: {error}") from None


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: is no number: {error}") from None
    _check(name, np.array(number))
    return number


def _check(name: str, values: Numbers) -> None:
    usual = (values >= SMALLEST) & (values <= LARGEST) | (values == 0) | (values == inf)
    if not usual.all():
        raise ValueError(f"{name}: {values[~usual].flat[0]:g} is neither 0 nor infinite nor between 1e-60 and 1e60")
