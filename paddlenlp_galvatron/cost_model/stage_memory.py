"""Peak memory of a rank of a stage: the bound that the search limits, and an estimate.

The bound adds up each term at its own worst moment, so that memory is a sum over layers. The estimate walks through the
passes of a step: gradients appear during its first backward, and a layer's working set is counted only with the
activations of earlier layers.

Attention masks, positions and a batch's ids are small in a real model, but the bound must include them. Profiles
without masks, such as Galvatron's, have none of these terms.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..base.units import FP32_BYTES, MIB
from ..model import ModelShape
from ..plan import Assumptions, Axis, Plan
from ..plan.schedule import Pass, PassKind, chunks_in_flight, without_repeats
from ..profiles.memory_use import MemoryUse
from .costs import CostOptions, LayerCost, PartMemory, StageMemory, Workspace

ENDS = ("embedding", "last norm", "LM head")  # weights outside the layers
ID_BYTES = 8  # bytes of a token id
BATCHES = 2  # batches of which a rank holds its rows: the current and the next


def memory_of(
    plan: Plan,
    stage: int,
    chunks: Sequence[Sequence[LayerCost]],
    options: CostOptions,
    reduced_each: bool,
    shared_mib: float,
) -> StageMemory:
    """Bound and estimate of a stage. If embedding and LM head are one part, backward begins with it. `reduced_each`:
    gradients are reduced after each micro-batch. `shared_mib`: memory that the layers share."""
    costs = [cost for chunk in chunks for cost in chunk]
    parts = [[cost.memory or PartMemory() for cost in chunk] for chunk in chunks]
    held, every = fullest(plan, stage, chunks), [module for chunk in parts for module in chunk]
    working_mib = Workspace.of(cost.workspace for cost in costs).total_mib
    memory = StageMemory(
        options.context_mib + (options.freed or 0.0) * working_mib,
        sum(cost.states_mib for cost in costs),
        _held_mib(chunks, held),
        working_mib,
        host_mib=sum(module.host_mib for module in every)
        + sum(count * sum(module.away_mib for module in chunk) for count, chunk in zip(held, parts, strict=True)),
    )
    ordered = [[*rest, first] for first, *rest in chunks] if plan.pipeline == 1 else chunks
    walked = [[module.memory for module in parts] for parts in ordered]
    estimated = [[module for module in parts if module is not None] for parts in walked]
    if estimated != walked:
        return memory
    runs = plan.schedule.runs(stage, plan.pipeline, plan.micro_batches, plan.chunks)
    passes = list(without_repeats(runs, plan.chunks))
    # A pass of a pipeline begins while copies of the previous pass or for the next pass are in flight.
    more_mib = max(module.away_mib for module in every) if plan.pipeline > 1 else 0.0
    estimate_mib = shared_mib + more_mib + peak_mib(estimated, passes, reduced_each)
    masters_first = any(module.matrix_mib for parts in estimated for module in parts)
    apart_mib = shared_mib + _apart_mib(costs, estimated, passes, reduced_each) if masters_first else 0.0
    return replace(memory, estimate_mib=estimate_mib, apart_mib=apart_mib)


def _apart_mib(
    costs: Sequence[LayerCost], chunks: Sequence[Sequence[PartMemory]], passes: Sequence[Pass], reduced_each: bool
) -> float:
    """Peak of a stage with offloaded optimizer states, if backward and the first update share no block. The update's
    fp32 weights are added to all activations, or to the largest part's tensors, one matrix's moments and the 16-bit
    weights gathered into separate blocks."""
    parts = [module for chunk in chunks for module in chunk]
    master_mib = sum(module.master_mib for module in parts)
    passes_alone = [[module._replace(matrix_mib=0.0) for module in chunk] for chunk in chunks]
    gathered_mib = sum(
        cost.terms.states.parameters_mib
        for cost in costs
        if cost.memory and cost.memory.kept_mib < cost.memory.gradient_mib
    )
    updating_mib = sum(module.fixed_mib + module.gradient_mib for module in parts) + gathered_mib
    updating_mib += max(module.matrix_mib for module in parts)
    updating_mib += max(module.activation_mib + module.working_mib for module in parts)
    return master_mib + max(peak_mib(passes_alone, passes, reduced_each), updating_mib)


def fullest(plan: Plan, stage: int, chunks: Sequence[Sequence[LayerCost]]) -> tuple[int, ...]:
    """Micro-batches of each chunk in flight at the peak of a stage's activations."""
    peaks = chunks_in_flight(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks)
    return max(peaks, key=lambda held: _held_mib(chunks, held))


def _held_mib(chunks: Sequence[Sequence[LayerCost]], in_flight: Sequence[int]) -> float:
    """MiB of activations of chunks with these numbers of micro-batches in flight."""
    each = (sum(module.activation_mib for module in chunk) for chunk in chunks)
    return sum(count * mib for count, mib in zip(in_flight, each, strict=True))


class _Sent(NamedTuple):
    """A part whose gradients are being reduced."""

    part: PartMemory = PartMemory()
    again: bool = False  # gradients of a later micro-batch, to be added to kept sums

    @property
    def spent_mib(self) -> float:
        """Memory that is freed when its gradients are reduced."""
        module = self.part
        return (module.joined_mib if self.again else module.gradient_mib - module.kept_mib) * (1 - module.late)


class _Start(NamedTuple):
    """State at the start of a micro-batch's backward on a stage, apart from the micro-batches in flight."""

    chunk: int
    states: tuple[int, ...]  # of each chunk's gradients: none, of some micro-batches, of all
    last: bool  # the chunk's last micro-batch
    sent: tuple[int, bool] | None  # if reduced each time: the previous backward's chunk; whether it added


def peak_mib(chunks: Sequence[Sequence[PartMemory]], passes: Sequence[Pass], reduced_each: bool = False) -> float:
    """`chunks`: the parts of each, in the order of forward; `passes` of the stage. Gradients of a chunk are reduced
    after its last micro-batch, or after each."""
    every = [module for parts in chunks for module in parts]
    fixed_mib = sum(module.fixed_mib for module in every)
    updating_mib = sum(module.master_mib + module.gradient_mib for module in every)
    updating_mib += max(module.matrix_mib for module in every)
    activations_mib = [sum(module.activation_mib for module in parts) for parts in chunks]
    gradients_mib = [(0.0, _between(parts, reduced_each), sum(module.kept_mib for module in parts)) for parts in chunks]
    micro_batches = sum(work.kind is PassKind.BACKWARD for work in passes) // len(chunks)
    in_flight_mib, done = 0.0, [0] * len(chunks)
    sent: tuple[int, bool] | None = None
    most_mib: dict[_Start, float] = {}  # peak by start, at backwards that are otherwise equal
    for work in passes:
        chunk = work.chunk
        if work.kind is PassKind.FORWARD:
            in_flight_mib += activations_mib[chunk]
            continue
        states = tuple((count > 0) + (count == micro_batches) for count in done)
        key = _Start(chunk, states, done[chunk] == micro_batches - 1, sent)
        most_mib[key] = max(most_mib.get(key, 0.0), in_flight_mib)
        in_flight_mib -= activations_mib[chunk]
        sent = (chunk, done[chunk] > 0) if reduced_each else None
        done[chunk] += 1
    peaks = [fixed_mib + updating_mib] if any(module.matrix_mib for module in every) else []
    for start, held_mib in most_mib.items():
        kept_mib = sum(sizes[state] for sizes, state in zip(gradients_mib, start.states, strict=True))
        last_sent = _Sent() if start.sent is None else _Sent(_last_sent(chunks[start.sent[0]]), start.sent[1])
        now = fixed_mib + held_mib + kept_mib + last_sent.spent_mib
        first = start.states[start.chunk] == 0
        peaks.append(_backward(chunks[start.chunk], now, first, start.last, reduced_each, last_sent))
    return max(peaks)


def _between(parts: Sequence[PartMemory], reduced_each: bool) -> float:
    """Gradients of parts between two micro-batches, in MiB."""
    if not reduced_each:
        return sum(module.gradient_mib for module in parts)
    return sum(module.kept_mib * (1 - module.late) + module.late_mib for module in parts)


def _last_sent(parts: Sequence[PartMemory]) -> PartMemory:
    """The module whose gradients backward reduces last, apart from those reduced at the step's end."""
    return next((module for module in parts if module.gradient_mib > module.late_mib), PartMemory())


def _backward(
    parts: Sequence[PartMemory], now: float, first: bool, last: bool, reduced_each: bool, sent: _Sent
) -> float:
    """The peak of one micro-batch's backward that begins with `now` MiB in use and these gradients in flight."""
    peak = now
    again = reduced_each and not first
    coming = [*parts[:-1][::-1], PartMemory()]  # parts whose weights are fetched during a part's backward
    for at, (module, following) in enumerate(zip(reversed(parts), coming, strict=True)):
        activations_mib = next((each.away_mib for each in coming[at:] if each.away_mib), 0.0)  # during this backward
        weights = module.gathered_mib + following.gathered_mib + activations_mib
        working_mib = module.working_mib + (module.made_mib if first else 0.0)
        peak = max(peak, now + weights + working_mib + sent.part.shard_mib)
        made_mib = module.gradient_mib if first else module.joined_mib if again else 0.0
        now += made_mib * (1 - module.late) - module.activation_mib
        peak = max(peak, now + weights + sent.part.shard_mib)
        if (last or reduced_each) and module.gradient_mib > module.late_mib:
            now -= sent.spent_mib
            peak, sent = max(peak, now + weights + module.joined_mib * (1 - module.late)), _Sent(module, again)
    now -= sent.spent_mib
    for module in parts:
        now += module.late_mib if first else 0.0
        if last and module.late_mib:
            peak = max(peak, now + module.joined_mib * module.late)
            now += (module.kept_mib - module.gradient_mib) * module.late
    return max(peak, now)


def constants_mib(models: Sequence[ModelShape], seqs: Sequence[int], memory: MemoryUse) -> float:
    """Memory that every stage keeps for all its layers: attention masks, sine and cosine of each position, and two
    powers of AdamW's betas for each weight tensor."""
    masks_mib = sum(memory.mask_mib(seq) for seq in set(seqs))
    if not memory.profile.mask_mib:
        return masks_mib
    tables = {(seq, model.rotary_dim) for seq, model in zip(seqs, models, strict=True)}
    numbers = sum(2 * seq * width for seq, width in tables)
    for model in models:
        numbers += 2 * (model.layers * len(model.block.weights) + len(ENDS))
    return masks_mib + numbers * FP32_BYTES / MIB


def positions_mib(model: ModelShape, tokens: int, memory: MemoryUse, assumed: Assumptions) -> float:
    """MiB of sine and cosine of `tokens` positions."""
    numbers = 2 * tokens * model.rotary_dim if memory.profile.mask_mib else 0
    return numbers * assumed.number_types.stored.bytes / MIB


def own_positions_mib(plan: Plan, stage: int, model: ModelShape, memory: MemoryUse) -> float:
    """MiB of sine and cosine of a rank's tokens, shared by context-parallel layers of the same mesh. One or two meshes
    need no more than the table of all tokens, which a layer's price includes."""
    meshes = {plan.layers[layer].mesh(plan.stage_size) for layer in plan.stage_layers(stage)}
    degrees = [degree for mesh in meshes if (degree := mesh.degree(Axis.CONTEXT)) > 1]
    tokens = sum((plan.assumed.seq_length or 0) // degree for degree in degrees)
    return positions_mib(model, tokens, memory, plan.assumed)


def batch_mib(memory: MemoryUse, rows: int, seq: int, micro_batches: int) -> float:
    """MiB of a rank's ids of a batch on the first stage and labels on the last, with each micro-batch's loss and number
    of tokens."""
    if not memory.profile.mask_mib:
        return 0.0
    return (BATCHES * rows * (seq + 1) * ID_BYTES + 2 * micro_batches * FP32_BYTES) / MIB
