"""Features of a plan that programs with one degree of each kind for the whole model lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...base.errors import UserError
from ...model import ModelShape
from ..schedules import Schedule
from ..strategy import DataParallel, LayerStrategy, Plan

Argument = bool | int | str | list[int]


def sharing(plan: Plan, layer: LayerStrategy) -> int:
    """Ranks that hold a layer's states together, or alike."""
    return plan.stage_size // layer.tp


def _dp_type(plan: Plan, layer: LayerStrategy) -> DataParallel:
    return layer.dp_type if sharing(plan, layer) > 1 else DataParallel.DDP


def sharding_stage(plan: Plan, layer: LayerStrategy | None = None) -> int:
    """The stage in which Paddle shards as the plan does a layer, the first if none is named; 0: none.

    Stage 1 keeps whole gradients, as zero2 does that sums micro-batches up.
    """
    summed = plan.assumed.async_grad_reduce and plan.micro_batches > 1
    stages = {DataParallel.DDP: 0, DataParallel.ZERO2: 1 if summed else 2, DataParallel.ZERO3: 3}
    return stages[_dp_type(plan, layer or plan.layers[0])]


def require_expressible(plan: Plan, program: str, model: ModelShape | None, own: Iterable[str]) -> None:
    """Raise UserError with a line for each field that `program` cannot express, for this model where it is given: what
    such programs lack, and the gaps of its `own`."""
    gaps = [*_uneven(plan, program), *_unlike(plan, program), *own]
    tp = plan.layers[0].tp
    if any(layer.experts.ranks > 1 or layer.experts_dp_type for layer in plan.layers):
        gaps.append(f"ep_sizes_enc: experts are not written for {program}")
    if model and model.vocab_size % tp:
        gaps.append(f"vtp: {program} does not split a vocabulary of {model.vocab_size} over {tp} ranks nor pad it")
    if gaps:
        raise UserError(f"{gap}; run it with galvatron train" for gap in gaps)


def placement_note(program: str) -> str:
    """How the program places a plan with a pipeline and data parallelism."""
    return (
        f"{program} puts the ranks of a pipeline side by side and data parallelism across them; in the plan the ranks "
        "of a stage are neighbours"
    )


def _unlike(plan: Plan, program: str) -> Iterator[str]:
    """Features that such programs lack, or cannot combine."""
    layer, stage, pipeline = plan.layers[0], sharding_stage(plan), plan.pipeline > 1
    if any(not each.consecutive and 1 < each.ranks < plan.stage_size for each in plan.layers):
        yield f"tp_consecutive_flags: in {program} neighbouring ranks form a tensor-parallel group"
    if pipeline and plan.schedule is not Schedule.ONE_F_ONE_B:
        yield f"pipeline_type: {program}'s pipeline is 1F1B, the plan's {plan.schedule}"
    if pipeline and stage > 1:
        yield f"dp_types_enc: {program}'s pipeline goes with sharding stage1 alone, the plan has {layer.dp_type}"
    if layer.tp > 1 and stage == 3:
        yield f"dp_types_enc: {program}'s tensor parallelism does not go with sharding stage3, the plan has zero3"


def _uneven(plan: Plan, program: str) -> Iterator[str]:
    """Fields in which layers, or layers and vocabulary, or stages are unlike, as `program` cannot have them."""
    parts = (*plan.layers, plan.vocab.as_layer())
    for axis in dict.fromkeys(axis for part in parts for axis, degree in part.beside if degree > 1):
        yield f"{axis}_sizes_enc: degrees other than 1 are not written for {program}"
    for field, of_vocab, values in (
        ("tp_sizes_enc", "vtp", [str(part.degree) for part in parts]),
        ("use_sp", "vsp", ["1" if part.ulysses and part.degree > 1 else "0" for part in parts]),
        ("dp_types_enc", "embed_sdp", [_dp_type(plan, part).value for part in parts]),
    ):
        *layers, vocab = values
        if len(set(layers)) > 1:
            yield f"{field}: {program} has one for all layers, the plan has {', '.join(dict.fromkeys(layers))}"
        elif vocab != layers[0]:
            yield f"{of_vocab}: {program} has one for embedding, LM head and layers, the plan {vocab} and {layers[0]}"
    if len(set(plan.stages)) > 1:
        shown = ",".join(map(str, plan.stages))
        yield f"pp_division: {program} gives every stage as many layers, the plan {shown}"
