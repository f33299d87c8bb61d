"""The most that a stage holds in one step, by walking through its passes: the estimate below the search's upper bound.

The bound adds up what each term takes at its own worst moment, so that memory is a sum over layers. Here gradients come
as a step's first backward goes on, and a layer's working set stands beside the activations of those before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.schedules import Pass


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What one part of a stage, a layer or vocabulary layers, takes on a rank, in MiB."""

    fixed_mib: float = 0.0  # all the time: weights, optimizer states, masks
    gradient_mib: float = 0.0  # whole, as backward makes them
    kept_mib: float = 0.0  # of these, when they are reduced
    late_mib: float = 0.0  # of the whole ones, the embedding's beside an LM head: made when the stage's backward ends
    activation_mib: float = 0.0  # of a micro-batch in flight
    working_mib: float = 0.0  # backward's peak above what is held
    gathered_mib: float = 0.0  # zero3's weights while the part runs
    joined_mib: float = 0.0  # the message in which gradients are reduced

    @property
    def shard_mib(self) -> float:
        """Of the gradients, what is kept of a message that goes when all of it has been reduced."""
        return self.kept_mib + self.joined_mib - self.gradient_mib if self.kept_mib < self.gradient_mib else 0.0


def peak_mib(chunks: Sequence[Sequence[PartMemory]], passes: Sequence[Pass]) -> float:
    """`chunks`: the parts of each, in the order of forward; `passes` of the stage. Gradients of a chunk are reduced
    after its last micro-batch."""
    fixed_mib = sum(part.fixed_mib for parts in chunks for part in parts)
    activations_mib = [sum(part.activation_mib for part in parts) for parts in chunks]
    gradients_mib = [
        (0.0, sum(part.gradient_mib for part in parts), sum(part.kept_mib for part in parts)) for parts in chunks
    ]
    micro_batches = sum(work.kind == "backward" for work in passes) // len(chunks)
    in_flight_mib, done = 0.0, [0] * len(chunks)
    most_mib: dict[tuple[int, tuple[int, ...], bool], float] = {}  # in flight, at backwards that are otherwise alike
    for work in passes:
        chunk = work.chunk
        if work.kind == "forward":
            in_flight_mib += activations_mib[chunk]
            continue
        states = tuple((count > 0) + (count == micro_batches) for count in done)  # of gradients: none, whole, reduced
        alike = chunk, states, done[chunk] == micro_batches - 1
        most_mib[alike] = max(most_mib.get(alike, 0.0), in_flight_mib)
        in_flight_mib -= activations_mib[chunk]
        done[chunk] += 1
    return max(
        _backward(
            chunks[chunk],
            fixed_mib + held_mib + sum(sizes[state] for sizes, state in zip(gradients_mib, states, strict=True)),
            first=states[chunk] == 0,
            last=last,
        )
        for (chunk, states, last), held_mib in most_mib.items()
    )


def _backward(parts: Sequence[PartMemory], now: float, first: bool, last: bool) -> float:
    """The peak of one micro-batch's backward that begins with so much held."""
    peak, sent = now, PartMemory()  # whose gradients are being reduced
    before = [*parts[:-1][::-1], PartMemory()]  # whose weights are fetched while a part's backward runs
    for part, following in zip(reversed(parts), before, strict=True):
        weights = part.gathered_mib + following.gathered_mib
        peak = max(peak, now + weights + part.working_mib + sent.shard_mib)
        made = part.gradient_mib - part.late_mib if first else 0.0
        now += made - part.activation_mib
        peak = max(peak, now + weights + sent.shard_mib)
        if last:
            now += (sent.kept_mib - sent.gradient_mib) * (1 - _late(sent))
            peak, sent = max(peak, now + weights + part.joined_mib), part
    now += (sent.kept_mib - sent.gradient_mib) * (1 - _late(sent))
    for part in parts:
        now += part.late_mib if first else 0.0
        if last and part.late_mib:
            peak = max(peak, now + part.joined_mib * _late(part))
            now += (part.kept_mib - part.gradient_mib) * _late(part)
    return max(peak, now)


def _late(part: PartMemory) -> float:
    return part.late_mib / part.gradient_mib if part.late_mib else 0.0
