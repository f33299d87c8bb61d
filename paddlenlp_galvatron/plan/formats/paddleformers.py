"""A plan as the YAML of PaddleFormers and PaddleFleet, PaddleNLP's successors (PaddleFormers 1.0.0).

Both have one degree of each kind for the whole model. Their Llama and Qwen2 recompute all layers or none, and have no
Ulysses; Megatron-SP, the pipeline and ZeRO are as stock PaddleNLP has them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...model import ModelShape, Recompute
from ..strategy import Plan, Precision
from .one_degree import Argument, placement_note, require_expressible, sharding_stage

NAME = "PaddleFormers"


def formers_arguments(plan: Plan, model: ModelShape | None = None) -> dict[str, Argument]:
    """Arguments for the YAML file of `paddleformers-cli train`, besides model and data.

    Raises UserError with one line for each field that it cannot express, for this model where it is given.
    """
    require_expressible(plan, NAME, model, _gaps(plan, model))
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
    if layer.recompute:
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    precision = plan.assumed.mixed_precision
    arguments |= {"bf16": precision is Precision.BF16, "fp16": precision is Precision.FP16}
    if precision is not Precision.FP32:
        arguments["fp16_opt_level"] = "O2"
    return arguments


def formers_notes(plan: Plan) -> list[str]:
    """Notes on a plan that PaddleFormers can express."""
    if plan.pipeline > 1 and plan.dp(plan.layers[0]) > 1:
        return [placement_note(NAME)]
    return []


def _gaps(plan: Plan, model: ModelShape | None) -> Iterator[str]:
    """Further features that PaddleFormers and its model lack."""
    layer = plan.layers[0]
    if layer.ulysses and layer.degree > 1:
        yield f"use_sp: {NAME}'s Llama and Qwen2 have no Ulysses"
    if len({each.recompute for each in plan.layers}) > 1:
        yield f"checkpoint: {NAME} recomputes all layers or none"
    if partly := dict.fromkeys(
        each.recompute.words for each in plan.layers if each.recompute not in (Recompute.NONE, Recompute.FULL)
    ):
        yield f"recompute_enc: {', '.join(partly)} is not written for {NAME}"
    if plan.chunks > 1:
        yield f"virtual_pp_deg: {plan.chunks} chunks a stage are not written for {NAME}"
    if model and model.kv_heads % layer.tp:
        yield f"tp_sizes_enc: {NAME} does not share {model.kv_heads} kv heads among {layer.tp} ranks"
