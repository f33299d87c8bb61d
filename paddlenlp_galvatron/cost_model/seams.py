"""The parts of a stage and the seams between them."""

from __future__ import annotations

from itertools import pairwise

from ..plan.strategy import LayerStrategy, Plan, VocabStrategy

Strategy = LayerStrategy | VocabStrategy


def stage_seams(plan: Plan, stage: int) -> list[tuple[Strategy | None, Strategy | None]]:
    """Neighbours between which a stage's tokens are handed on; None is the stage's edge."""
    parts: list[Strategy | None] = [plan.layers[layer] for layer in plan.stage_layers(stage)]
    parts.insert(0, plan.vocab if stage == 0 else None)
    parts.append(plan.vocab if stage == len(plan.stages) - 1 else None)
    return list(pairwise(parts))
