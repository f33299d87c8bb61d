"""GLOBAL mode: one strategy for all layers, given by Galvatron's training options."""

from collections.abc import Collection
from dataclasses import replace

from ..base.errors import UserError, member
from ..model import Recompute
from .check import find_faults, require_valid
from .mesh import divisors
from .schedule import Schedule
from .strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy, sharded_over_all


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; the first stages take the remainder (the last one has the LM head)."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def one_sample_each(plan: Plan) -> Plan:
    """A plan of like layers with the most micro-batches that it can have: one sample of each on a data-parallel rank,
    where the batch allows. They take the least memory, and pipelines wait least."""
    dp = plan.dp(plan.layers[0])
    for count in reversed(divisors(plan.global_batch)):
        made = replace(plan, micro_batches=count)
        if plan.global_batch % (count * dp) == 0 and not find_faults(made):
            return made
    return plan


# Parameters of `uniform_plan` that are at least 1.
SIZES = (
    *("layers", "world_size", "global_train_batch_size", "chunks", "pp_deg", "virtual_pp_deg"),
    *("global_tp_deg", "global_cp_deg", "global_ep_deg", "global_tp_of_ep_deg", "vocab_tp"),
)


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
    global_ep_deg: int = 1,
    global_tp_of_ep_deg: int = 1,
    global_cp_deg: int = 1,
    global_sharding_deg: int | None = None,
    virtual_pp_deg: int = 1,
    assumed: Assumptions = Assumptions(),
    dense_layers: Collection[int] = (),
) -> Plan:
    """The plan that GLOBAL mode's options stand for, by their own names. `dense_layers`: they have no experts to share
    out or to split. Raises UserError."""
    sizes = layers, world_size, global_train_batch_size, chunks, pp_deg, virtual_pp_deg
    degrees = global_tp_deg, global_cp_deg, global_ep_deg, global_tp_of_ep_deg, vocab_tp
    for name, value in zip(SIZES, (*sizes, *degrees), strict=True):
        if value < 1:
            raise UserError(f"{name}: must be at least 1 (it is {value})")
    if pp_deg * virtual_pp_deg > layers:
        name, what = ("pp_deg", "stages") if pp_deg > layers else ("virtual_pp_deg", "chunks of stages")
        raise UserError(
            f"{name}: {pp_deg * virtual_pp_deg} {what} are more than the {layers} layers; choose at most {layers}"
        )
    default = member(DataParallel, default_dp_type, "default_dp_type")
    dp_type = DataParallel.ZERO3 if sdp else default
    vocab_type = dp_type if embed_sdp is None else DataParallel.ZERO3 if embed_sdp else default
    layer = LayerStrategy(global_tp_deg, use_ulysses, global_tp_consec, dp_type, Recompute(global_checkpoint))
    layer = replace(layer, context=global_cp_deg, sharding=global_sharding_deg)
    sparse = replace(layer, ep=global_ep_deg, etp=global_tp_of_ep_deg)
    plan = Plan(
        world_size=world_size,
        global_batch=global_train_batch_size,
        micro_batches=chunks,
        stages=even_stages(layers, pp_deg * virtual_pp_deg),
        layers=tuple(layer if index in dense_layers else sparse for index in range(layers)),
        vocab=VocabStrategy(vocab_tp, use_ulysses, vocab_type, global_sharding_deg, context=global_cp_deg),
        schedule=member(Schedule, pipeline_type, "pipeline_type"),
        chunks=virtual_pp_deg,
        default_dp_type=default,
        assumed=assumed,
    )
    plan = sharded_over_all(plan)
    require_valid(plan)
    return plan
