"""The stage problem: one strategy for each layer, least time within a memory budget, solved exactly by the C++ core."""

from __future__ import annotations

from dataclasses import dataclass

import galvatron_dp_core
import numpy as np
from numpy.typing import ArrayLike, NDArray


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
    that all differ make the optimum too hard, or take more than 400 MiB: allow a gap, or a wider one.
    """
    time, choice, memory, bound = galvatron_dp_core.solve_layers(
        _table("memory_mib", memory_mib),
        _table("time_s", time_s),
        _table("switch_s", switch_s),
        _number("budget_mib", budget_mib),
        _number("gap", gap),
    )
    return Solution(time, tuple(choice), memory, bound)


def _table(name: str, values: ArrayLike) -> NDArray[np.float64]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: is no table of numbers: {error}") from None


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: is no number: {error}") from None
