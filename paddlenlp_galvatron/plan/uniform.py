"""GLOBAL mode: one strategy for all layers, given by Galvatron's training options."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from pydantic import Field

from ..base.errors import UserError
from ..base.limits import Ranks, Samples
from .check import require_valid
from .options import Options
from .schedules import Schedule
from .strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy

E = TypeVar("E", bound=StrEnum)


class UniformOptions(Options):
    """GLOBAL mode: one strategy for all layers. Unset options have `uniform_plan`'s defaults."""

    pp_deg: Ranks | None = Field(None, description="pipeline stages")
    global_tp_deg: Ranks | None = Field(None, description="tensor-parallel degree of all layers")
    global_tp_consec: bool | None = Field(None, description="1: neighbouring ranks form a tp group; 0: strided")
    sdp: bool | None = Field(None, description="1: zero3 instead of default_dp_type")
    default_dp_type: str | None = Field(None, description="ddp, zero2 or zero3")
    global_train_batch_size: Samples | None = Field(None, description="samples of an optimizer step, over all ranks")
    chunks: Samples | None = Field(None, description="micro-batches")
    global_checkpoint: bool | None = Field(None, description="1: recompute activations of all layers")
    pipeline_type: str | None = Field(None, description="pipedream_flush (1F1B) or gpipe")
    vocab_tp: Ranks | None = Field(None, description="tensor-parallel degree of embedding and LM head")
    embed_sdp: bool | None = Field(None, description="1: vocabulary layers under zero3; 0: not; unset: as sdp says")
    use_ulysses: bool | None = Field(None, description="1: the degrees split the sequence instead of the weights")

    def plan(self, layers: int, world_size: int, assumed: Assumptions) -> Plan:
        """The plan that the options stand for. Raises UserError."""
        given = self.model_dump(exclude_none=True)
        if "global_train_batch_size" not in given:
            raise UserError("global_train_batch_size: missing; say how many samples an optimizer step takes")
        return uniform_plan(layers=layers, world_size=world_size, assumed=assumed, **given)


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; the first stages take the remainder (the last one has the LM head)."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def uniform_plan(
    *,
    layers: int,
    world_size: int,
    global_train_batch_size: int,
    pp_deg: int = 1,
    global_tp_deg: int = 1,
    global_tp_consec: bool = True,
    sdp: bool = False,
    chunks: int = 1,
    global_checkpoint: bool = False,
    pipeline_type: str = "pipedream_flush",
    vocab_tp: int = 1,
    embed_sdp: bool | None = None,
    default_dp_type: str = "ddp",
    use_ulysses: bool = False,
    assumed: Assumptions = Assumptions(),
) -> Plan:
    """The plan that GLOBAL mode's options stand for, by their own names. Raises UserError."""
    for name, value in (
        ("layers", layers),
        ("world_size", world_size),
        ("global_train_batch_size", global_train_batch_size),
        ("pp_deg", pp_deg),
        ("global_tp_deg", global_tp_deg),
        ("chunks", chunks),
        ("vocab_tp", vocab_tp),
    ):
        if value < 1:
            raise UserError(f"{name}: must be at least 1 (it is {value})")
    if pp_deg > layers:
        raise UserError(f"pp_deg: {pp_deg} stages are more than the {layers} layers; choose at most {layers}")
    default = _member(DataParallel, default_dp_type, "default_dp_type")
    dp_type = DataParallel.ZERO3 if sdp else default
    vocab_type = dp_type if embed_sdp is None else default
    plan = Plan(
        world_size=world_size,
        global_batch=global_train_batch_size,
        micro_batches=chunks,
        stages=even_stages(layers, pp_deg),
        layers=(LayerStrategy(global_tp_deg, use_ulysses, global_tp_consec, dp_type, global_checkpoint),) * layers,
        vocab=VocabStrategy(vocab_tp, use_ulysses, DataParallel.ZERO3 if embed_sdp else vocab_type),
        schedule=_member(Schedule, pipeline_type, "pipeline_type"),
        default_dp_type=default,
        assumed=assumed,
    )
    require_valid(plan)
    return plan


def _member(kind: type[E], value: str, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise UserError(f"{name}: {value!r} is unknown; choose one of {known}") from None
