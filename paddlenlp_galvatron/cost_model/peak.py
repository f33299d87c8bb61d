"""The most that a stage holds in one step, by walking through its passes: the estimate below the search's upper bound.

The bound adds up what each term takes at its own worst moment, so that memory is a sum over layers. Here gradients come
as a step's first backward goes on, and a layer's working set stands beside the activations of those before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan.schedules import Pass


class Update(NamedTuple):
    """Memory of a part's first update with optimizer states in the host's memory, in MiB."""

    master_mib: float = 0.0  # fp32 weights
    tensor_mib: float = 0.0  # moments of its largest matrix
    states_mib: float = 0.0  # all of its states, in the host's memory


class PartMemory(NamedTuple):
    """Memory of one part of a stage, a layer or vocabulary layers, on a rank, in MiB."""

    fixed_mib: float = 0.0  # all the time: weights, optimizer states, masks
    gradient_mib: float = 0.0  # whole, as backward makes them
    kept_mib: float = 0.0  # of these, when they are reduced
    late_mib: float = 0.0  # of the whole ones, what is reduced when a step ends, as an embedding's beside an LM head
    activation_mib: float = 0.0  # of a micro-batch in flight
    working_mib: float = 0.0  # backward's peak above what is held
    made_mib: float = 0.0  # of the gradients, what a step's first backward has made by then
    gathered_mib: float = 0.0  # zero3's weights while the part runs
    joined_mib: float = 0.0  # the message in which gradients are reduced
    update: Update = Update()

    @property
    def shard_mib(self) -> float:
        """Part of a message of gradients that stays until all of it has been reduced."""
        return self.kept_mib + self.joined_mib - self.gradient_mib if self.kept_mib < self.gradient_mib else 0.0

    @property
    def late(self) -> float:
        """Share of the gradients that is late."""
        return self.late_mib / self.gradient_mib if self.late_mib else 0.0


class _Sent(NamedTuple):
    """A part whose gradients are being reduced."""

    part: PartMemory = PartMemory()
    again: bool = False  # they are those of a further micro-batch, to be added to what is kept

    @property
    def spent_mib(self) -> float:
        """Memory that is freed when they are reduced."""
        part = self.part
        return (part.joined_mib if self.again else part.gradient_mib - part.kept_mib) * (1 - part.late)


class _Start(NamedTuple):
    """State at the start of a micro-batch's backward on a stage, apart from the micro-batches in flight."""

    chunk: int
    states: tuple[int, ...]  # of each chunk's gradients: none, of some micro-batches, of all
    last: bool  # of the chunk's micro-batches
    sent: tuple[int, bool] | None  # where each is reduced: the chunk of the backward before, and whether it added to it


def peak_mib(chunks: Sequence[Sequence[PartMemory]], passes: Sequence[Pass], reduced_each: bool = False) -> float:
    """`chunks`: the parts of each, in the order of forward; `passes` of the stage. Gradients of a chunk are reduced
    after its last micro-batch, or after each."""
    every = [part for parts in chunks for part in parts]
    fixed_mib = sum(part.fixed_mib for part in every)
    updating_mib = sum(part.update.master_mib + part.gradient_mib for part in every)
    updating_mib += max(part.update.tensor_mib for part in every)
    activations_mib = [sum(part.activation_mib for part in parts) for parts in chunks]
    gradients_mib = [(0.0, _between(parts, reduced_each), sum(part.kept_mib for part in parts)) for parts in chunks]
    micro_batches = sum(work.kind == "backward" for work in passes) // len(chunks)
    in_flight_mib, done = 0.0, [0] * len(chunks)
    sent: tuple[int, bool] | None = None
    most_mib: dict[_Start, float] = {}  # in flight, at backwards that are otherwise alike
    for work in passes:
        chunk = work.chunk
        if work.kind == "forward":
            in_flight_mib += activations_mib[chunk]
            continue
        states = tuple((count > 0) + (count == micro_batches) for count in done)
        alike = _Start(chunk, states, done[chunk] == micro_batches - 1, sent)
        most_mib[alike] = max(most_mib.get(alike, 0.0), in_flight_mib)
        in_flight_mib -= activations_mib[chunk]
        sent = (chunk, done[chunk] > 0) if reduced_each else None
        done[chunk] += 1
    peaks = [fixed_mib + updating_mib] if any(part.update.states_mib for part in every) else []
    for start, held_mib in most_mib.items():
        kept_mib = sum(sizes[state] for sizes, state in zip(gradients_mib, start.states, strict=True))
        before = _Sent() if start.sent is None else _Sent(_last_sent(chunks[start.sent[0]]), start.sent[1])
        now = fixed_mib + held_mib + kept_mib + before.spent_mib
        first = start.states[start.chunk] == 0
        peaks.append(_backward(chunks[start.chunk], now, first, start.last, reduced_each, before))
    return max(peaks)


def _between(parts: Sequence[PartMemory], reduced_each: bool) -> float:
    """Gradients that parts hold between two micro-batches, in MiB."""
    if not reduced_each:
        return sum(part.gradient_mib for part in parts)
    return sum(part.kept_mib * (1 - part.late) + part.late_mib for part in parts)


def _last_sent(parts: Sequence[PartMemory]) -> PartMemory:
    """Whose gradients a backward reduces last, but for late ones."""
    return next((part for part in parts if part.gradient_mib > part.late_mib), PartMemory())


def _backward(
    parts: Sequence[PartMemory], now: float, first: bool, last: bool, reduced_each: bool, sent: _Sent
) -> float:
    """The peak of one micro-batch's backward that begins with so much held, and with these gradients being reduced."""
    peak = now
    again = reduced_each and not first
    before = [*parts[:-1][::-1], PartMemory()]  # whose weights are fetched while a part's backward runs
    for part, following in zip(reversed(parts), before, strict=True):
        weights = part.gathered_mib + following.gathered_mib
        working_mib = part.working_mib + (part.made_mib if first else 0.0)
        peak = max(peak, now + weights + working_mib + sent.part.shard_mib)
        made_mib = part.gradient_mib if first else part.joined_mib if again else 0.0
        now += made_mib * (1 - part.late) - part.activation_mib
        peak = max(peak, now + weights + sent.part.shard_mib)
        if (last or reduced_each) and part.gradient_mib > part.late_mib:
            now -= sent.spent_mib
            peak, sent = max(peak, now + weights + part.joined_mib * (1 - part.late)), _Sent(part, again)
    now -= sent.spent_mib
    for part in parts:
        now += part.late_mib if first else 0.0
        if last and part.late_mib:
            peak = max(peak, now + part.joined_mib * part.late)
            now += (part.kept_mib - part.gradient_mib) * part.late
    return max(peak, now)
