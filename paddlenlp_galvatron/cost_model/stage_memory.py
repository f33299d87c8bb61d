"""Peak memory of a rank of a stage: an upper bound and an estimate from the memory of its parts, and what no part has.

Attention masks, positions and a batch's ids are small beside a real model, but a bound is one only with them. Profiles
that do not tell of masks, such as Galvatron's, tell of none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..model import ModelShape
from ..plan.mesh import Axis
from ..plan.schedules import chunks_in_flight, without_repeats
from ..plan.strategy import Assumptions, Plan
from ..profiles.memory_use import MemoryUse
from .costs import LayerCost, StageMemory, Workspace
from .peak import peak_mib
from .weights import FP32_BYTES

MIB = 2**20
ENDS = ("embedding", "last norm", "LM head")  # weights that no layer has
ID_BYTES = 8  # of a token's number
BATCHES = 2  # of which a rank holds its own rows: the one in use and the next


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
    costs = [cost for chunk in chunks for cost in chunk]
    memory = StageMemory(
        context_mib,
        sum(cost.states_mib for cost in costs),
        _held_mib(chunks, fullest(plan, stage, chunks)),
        Workspace.of(cost.workspace for cost in costs).total_mib,
    )
    ordered = [[*rest, first] for first, *rest in chunks] if plan.pipeline == 1 else chunks
    walked = [[part.memory for part in parts] for parts in ordered]
    known = [[part for part in parts if part is not None] for parts in walked]
    if known != walked:
        return memory
    runs = plan.schedule.runs(stage, plan.pipeline, plan.micro_batches, plan.chunks)
    estimate_mib = shared_mib + peak_mib(known, list(without_repeats(runs, plan.chunks)), reduced_each)
    offloaded_mib = sum(part.update.states_mib for parts in known for part in parts)
    return replace(memory, estimate_mib=estimate_mib, offloaded_mib=offloaded_mib)


def fullest(plan: Plan, stage: int, chunks: Sequence[Sequence[LayerCost]]) -> tuple[int, ...]:
    """Micro-batches of each chunk that a stage holds when their activations take most."""
    peaks = chunks_in_flight(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks)
    return max(peaks, key=lambda held: _held_mib(chunks, held))


def _held_mib(chunks: Sequence[Sequence[LayerCost]], in_flight: Sequence[int]) -> float:
    """Activations of chunks of which so many micro-batches are in flight."""
    each = (sum(part.activation_mib for part in chunk) for chunk in chunks)
    return sum(count * mib for count, mib in zip(in_flight, each, strict=True))


def constants_mib(models: Sequence[ModelShape], seqs: Sequence[int], memory: MemoryUse) -> float:
    """Memory that every stage keeps for all its layers: attention masks, sine and cosine of each position, AdamW's
    powers of its betas, two for each weight of any stage."""
    masks_mib = sum(memory.mask_mib(seq) for seq in set(seqs))
    if not memory.profile.mask_mib:
        return masks_mib
    tables = {(seq, model.head_dim) for seq, model in zip(seqs, models, strict=True)}
    numbers = sum(2 * seq * width for seq, width in tables)
    for model in models:
        numbers += 2 * (model.layers * len(model.block.weights) + len(ENDS))
    return masks_mib + numbers * FP32_BYTES / MIB


def positions_mib(model: ModelShape, tokens: int, memory: MemoryUse, assumed: Assumptions) -> float:
    """Sine and cosine of so many of a sample's tokens."""
    numbers = 2 * tokens * model.head_dim if memory.profile.mask_mib else 0
    return numbers * assumed.mixed_precision.bytes / MIB


def own_positions_mib(plan: Plan, stage: int, model: ModelShape, memory: MemoryUse) -> float:
    """Those of a rank's own tokens, which the layers of context parallelism of one mesh share: of one mesh and of two
    no more than those of all tokens, of which a layer's price has room."""
    meshes = {plan.layers[layer].mesh(plan.stage_size) for layer in plan.stage_layers(stage)}
    degrees = [degree for mesh in meshes if (degree := mesh.degree(Axis.CONTEXT)) > 1]
    tokens = sum((plan.assumed.seq_length or 0) // degree for degree in degrees)
    return positions_mib(model, tokens, memory, plan.assumed)


def batch_mib(memory: MemoryUse, rows: int, seq: int, micro_batches: int) -> float:
    """Ids of a rank's own rows of a batch on the first stage, and labels on the last, with each micro-batch's loss and
    number of tokens."""
    if not memory.profile.mask_mib:
        return 0.0
    return (BATCHES * rows * (seq + 1) * ID_BYTES + 2 * micro_batches * FP32_BYTES) / MIB
