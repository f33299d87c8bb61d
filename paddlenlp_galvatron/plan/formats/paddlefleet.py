"""A plan as the YAML of PaddleFleet (September 2026), PaddleNLP's successor, and of the older PaddleFormers 1.0.0.

Both have the same names, and one degree of each kind for the whole model. They recompute all layers, or the first
layers of each stage, as many in each. Their Llama and Qwen2 have no Ulysses; Megatron-SP, the pipeline and ZeRO are as
stock PaddleNLP has them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...model import ModelShape, Recompute
from ..strategy import Plan, Precision
from .one_degree import Argument, placement_note, require_expressible, sharding_stage

FLEET, FORMERS = "PaddleFleet", "PaddleFormers"


def fleet_arguments(plan: Plan, model: ModelShape | None = None, program: str = FLEET) -> dict[str, Argument]:
    """Arguments for the YAML file of `paddlefleet-cli train` or `paddleformers-cli train`, besides model and data.

    Raises UserError with one line for each field that it cannot express, for this model where it is given.
    """
    require_expressible(plan, program, model, _gaps(plan, model, program))
    layer, stage = plan.layers[0], sharding_stage(plan)
    arguments: dict[str, Argument] = {
        "stage": "PT",  # its default fine-tunes
        "fine_tuning": "full",
        "per_device_train_batch_size": plan.micro_batch // plan.dp(layer),
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if plan.assumed.seq_length:
        arguments["max_seq_len"] = plan.assumed.seq_length
    arguments |= {
        "tensor_model_parallel_size": layer.tp,
        "pipeline_model_parallel_size": plan.pipeline,
        "sequence_parallel": layer.tp > 1 and plan.assumed.sequence_parallel,
        "sharding": f"stage{stage}" if stage else "",  # its default is stage1
    }
    if stage:
        arguments["sharding_parallel_size"] = plan.dp(layer)
    if counts := _recomputed_first(plan):
        (count,) = counts
        whole = count == plan.stages[0]
        how: dict[str, Argument] = {"recompute_method": "uniform" if whole else "block"}
        arguments |= {"recompute_granularity": "full"} | how | {"recompute_num_layers": 1 if whole else count}
    precision = plan.assumed.mixed_precision
    arguments |= {"bf16": precision is Precision.BF16, "fp16": precision is Precision.FP16}
    if precision is not Precision.FP32:
        arguments["fp16_opt_level"] = "O2"
    return arguments


def fleet_notes(plan: Plan, program: str = FLEET) -> list[str]:
    """Notes on a plan that the program can express."""
    if plan.pipeline > 1 and plan.dp(plan.layers[0]) > 1:
        return [placement_note(program)]
    return []


def _recomputed_first(plan: Plan) -> set[int] | None:
    """How many layers each stage recomputes, its first ones; None where it is none, or not the first ones."""
    counts = set()
    for stage in range(plan.pipeline):
        flags = [plan.layers[layer].recompute is Recompute.FULL for layer in plan.stage_layers(stage)]
        if flags != sorted(flags, reverse=True):
            return None
        counts.add(sum(flags))
    return counts - {0} if len(counts) == 1 else None


def _gaps(plan: Plan, model: ModelShape | None, program: str) -> Iterator[str]:
    """Further features that the program and its model lack."""
    layer = plan.layers[0]
    if layer.ulysses and layer.degree > 1:
        yield f"use_sp: {program}'s Llama and Qwen2 have no Ulysses"
    if any(each.recompute is Recompute.FULL for each in plan.layers) and not _recomputed_first(plan):
        yield f"checkpoint: {program} recomputes the first layers of each stage, as many in each"
    if partly := dict.fromkeys(
        each.recompute.words for each in plan.layers if each.recompute not in (Recompute.NONE, Recompute.FULL)
    ):
        yield f"recompute_enc: {', '.join(partly)} is not written for {program}"
    if plan.chunks > 1:
        yield f"virtual_pp_deg: {plan.chunks} chunks a stage are not written for {program}"
    if model and model.kv_heads % layer.tp:
        yield f"tp_sizes_enc: {program} does not share {model.kv_heads} kv heads among {layer.tp} ranks"
