"""A stage's memory besides weights, gradients and activations: attention masks, positions, a batch's ids.

Small beside a real model, but a bound is one only with them. Profiles that do not tell of masks, such as Galvatron's,
tell of none of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model import ModelShape
from ..plan.mesh import Axis
from ..plan.strategy import Plan
from ..profiles.memory_use import MemoryUse
from .states import FP32_BYTES

MIB = 2**20
ENDS = ("embedding", "last norm", "LM head")  # weights that no layer has
ID_BYTES = 8  # of a token's number
BATCHES = 2  # of which a rank holds its own rows: the one in use and the next


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


def own_positions_mib(plan: Plan, stage: int, model: ModelShape, memory: MemoryUse) -> float:
    """Sine and cosine of a rank's own tokens, which the layers of context parallelism of one mesh share."""
    if not memory.profile.mask_mib:
        return 0.0
    meshes = {plan.layers[layer].mesh(plan.stage_size) for layer in plan.stage_layers(stage)}
    degrees = [degree for mesh in meshes if (degree := mesh.degree(Axis.CONTEXT)) > 1]
    tokens = sum((plan.assumed.seq_length or 0) // degree for degree in degrees)
    return 2 * tokens * model.head_dim * plan.assumed.mixed_precision.bytes / MIB


def batch_mib(memory: MemoryUse, rows: int, seq: int, micro_batches: int) -> float:
    """Ids of a rank's own rows of a batch on the first stage, and labels on the last, with each micro-batch's loss and
    number of tokens."""
    if not memory.profile.mask_mib:
        return 0.0
    return (BATCHES * rows * (seq + 1) * ID_BYTES + 2 * micro_batches * FP32_BYTES) / MIB
