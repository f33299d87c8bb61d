"""The same problems as the C++ core's, solved in a few plain lines: what the tests hold the core to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

Table = Sequence[Sequence[float]]


def best_by_enumeration(memory: Table, time: Table, switch: Sequence[Table], budget: float) -> float:
    """Least time over all K^L choices; arguments as those of `planner.solver.solve`, switch as [L, K, K]."""
    layers, strategies = range(len(memory)), range(len(memory[0]))
    return min(
        (
            sum(time[layer][choice[layer]] for layer in layers)
            + sum(switch[layer][choice[layer - 1]][choice[layer]] for layer in layers if layer)
            for choice in product(strategies, repeat=len(layers))
            if sum(memory[layer][choice[layer]] for layer in layers) <= budget
        ),
        default=inf,
    )


def best_by_labels(memory: Table, time: Table, switch: Sequence[Table], budget: float) -> float:
    """The same, layer by layer: for each last strategy the (memory, time) pairs that no other pair beats."""
    strategies = range(len(memory[0]))
    labels: dict[int, list[tuple[float, float]]] = {-1: [(0.0, 0.0)]}
    for layer in range(len(memory)):
        labels = {
            k: _pareto(
                (used + memory[layer][k], spent + time[layer][k] + (switch[layer][before][k] if layer else 0.0))
                for before, pairs in labels.items()
                for used, spent in pairs
                if used + memory[layer][k] <= budget
            )
            for k in strategies
        }
    return min((spent for pairs in labels.values() for _, spent in pairs), default=inf)


def _pareto(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for used, spent in sorted(pairs):
        if not kept or spent < kept[-1][1]:
            kept.append((used, spent))
    return kept
