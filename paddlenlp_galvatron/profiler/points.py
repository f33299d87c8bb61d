"""Chooses which shapes, batch sizes, sequence lengths and degrees of a model to profile. Needs no Paddle."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from ..options.model_options import SEQ, ModelOptions
from ..plan import Assumptions, LayerStrategy, ModelShape, Plan, UserError, VocabStrategy
from ..plan.check import require_valid
from ..profiles import Shape
from .options import PointOptions


class ModelRun(BaseModel):
    """Goes to the ranks as JSON."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    options: PointOptions
    shapes: tuple[ModelShape, ...]  # one a layer type
    points: tuple[Shape, ...]
    degrees: tuple[int, ...]  # of tensor parallelism
    computation: bool = True
    memory: bool = True


def measured_model(options: PointOptions, model: ModelOptions) -> tuple[tuple[ModelShape, ...], list[Shape]]:
    """The shape of each layer type, and every (samples, sequence length) to measure. Raises UserError."""
    told = model.seq_length or model.seqlen_list or model.set_seqlen_manually is not None
    resolved = model.model_copy(update={} if told else {"set_seqlen_manually": False}).resolve()
    shape = resolved.shapes[0]
    if len(resolved.shapes) > 1 and any(each.experts for each in resolved.shapes):
        raise UserError(
            f"model_size: {shape.name} has experts; several types of layers are not planned for such models"
        )
    lengths = options.lengths(resolved.seq_length if told else min(resolved.seq_length, SEQ))
    if max(lengths) > shape.max_position_embeddings:
        raise UserError(
            f"profile_seq_length_list: {max(lengths)} tokens are beyond the {shape.max_position_embeddings} positions "
            f"of {shape.name}; measure shorter samples"
        )
    return resolved.shapes, [Shape(batch, seq) for seq in lengths for batch in options.batch_sizes]


def runnable_degrees(shape: ModelShape, world_size: int, largest: int, lengths: Sequence[int]) -> list[int]:
    """Tensor-parallel degrees up to `largest` that divide the world and that the model can be split by.

    One process stands for a rank of any world: then those that divide `largest`.
    """
    world_size = largest if world_size == 1 else world_size
    return [
        degree
        for degree in range(1, min(world_size, largest) + 1)
        if world_size % degree == 0 and all(_is_runnable(shape, degree, length) for length in lengths)
    ]


def _is_runnable(shape: ModelShape, degree: int, seq_length: int) -> bool:
    plan = Plan(
        world_size=degree,
        global_batch=1,
        micro_batches=1,
        stages=(shape.layers,),
        layers=(LayerStrategy(degree),) * shape.layers,
        vocab=VocabStrategy(degree),
        assumed=Assumptions(sequence_parallel=True, seq_length=seq_length),  # the stricter case
    )
    try:
        require_valid(plan, shape)
    except UserError:
        if degree == 1:
            raise  # a model that cannot run at all: say why
        return False
    return True
