"""Peak memory of a rank of a stage from the memory of its parts: an upper bound and an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..plan.schedules import chunks_in_flight, without_repeats
from ..plan.strategy import Plan
from .costs import LayerCost, StageMemory
from .peak import peak_mib


def bound_of(chunks: Sequence[Sequence[LayerCost]], in_flight: Sequence[int], context_mib: float) -> StageMemory:
    """Bound of a stage whose chunks hold these parts, each for so many micro-batches."""
    costs = [cost for chunk in chunks for cost in chunk]
    return StageMemory(
        context_mib,
        sum(cost.states_mib for cost in costs),
        _held_mib(chunks, in_flight),
        max((cost.working_mib for cost in costs), default=0.0),
    )


def memory_of(
    plan: Plan,
    stage: int,
    chunks: Sequence[Sequence[LayerCost]],
    context_mib: float,
    reduced_each: bool,
    shared_mib: float,
) -> StageMemory:
    """Bound and estimate of a stage. The embedding's part has the LM head, where both are one: backward begins with
    it. `reduced_each`: gradients are, after each micro-batch. `shared_mib`: what its layers hold together."""
    memory = bound_of(chunks, fullest(plan, stage, chunks), context_mib)
    memory = replace(memory, states_mib=memory.states_mib + shared_mib)
    ordered = [[*rest, first] for first, *rest in chunks] if plan.pipeline == 1 else chunks
    walked = [[part.memory for part in parts] for parts in ordered]
    known = [[part for part in parts if part is not None] for parts in walked]
    if known != walked:
        return memory
    neighbours = (pair for parts in ordered for pair in pairwise(parts))
    working_mib = max((_beside_mib(part, before) for before, part in neighbours), default=0.0)
    runs = plan.schedule.runs(stage, plan.pipeline, plan.micro_batches, plan.chunks)
    estimate_mib = shared_mib + peak_mib(known, list(without_repeats(runs, plan.chunks)), reduced_each)
    # No price has what neighbours do to each other: a message under way is as large as the part behind made it.
    working_mib = max(memory.working_mib, working_mib, estimate_mib - memory.states_mib - memory.activations_mib)
    offloaded_mib = sum(part.update.states_mib for parts in known for part in parts)
    return replace(memory, working_mib=working_mib, estimate_mib=estimate_mib, offloaded_mib=offloaded_mib)


def _beside_mib(part: LayerCost, before: LayerCost) -> float:
    """Working set of a part whose backward runs while the weights of the part before it are fetched: its own price has
    room for weights as large as its own alone."""
    assert part.memory and before.memory
    return part.working_mib + max(before.memory.gathered_mib - part.memory.gathered_mib, 0.0)


def fullest(plan: Plan, stage: int, chunks: Sequence[Sequence[LayerCost]]) -> tuple[int, ...]:
    """Micro-batches of each chunk that a stage holds when their activations take most."""
    peaks = chunks_in_flight(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks)
    return max(peaks, key=lambda held: _held_mib(chunks, held))


def _held_mib(chunks: Sequence[Sequence[LayerCost]], in_flight: Sequence[int]) -> float:
    """Activations of chunks of which so many micro-batches are in flight."""
    each = (sum(part.activation_mib for part in chunk) for chunk in chunks)
    return sum(count * mib for count, mib in zip(in_flight, each, strict=True))
