"""A plan as arguments of PaddleNLP's own `run_pretrain.py`, as far as those can say it (PaddleNLP 3.0.0b4).

Stock PaddleNLP has one degree of each kind for the whole model, and its Trainer refuses some combinations of them.
When gradients are reduced is its own affair; where weights, gradients and optimizer states lie is as in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...model import ModelShape, Recompute
from ..strategy import Plan, Precision
from .one_degree import Argument, placement_note, require_expressible, sharding_stage, sharing

STOCK = "stock PaddleNLP"
# Its `recompute_granularity`, one for all layers that recompute. Unlike ours, `core_attn` keeps the core's output.
GRANULARITY = {Recompute.FULL: "full", Recompute.ATTENTION: "core_attn"}


def stock_arguments(plan: Plan, model: ModelShape | None = None) -> dict[str, Argument]:
    """Arguments with which stock PaddleNLP trains as the plan says; those at PaddleNLP's default are left out.

    Raises UserError with one line for each field that it cannot express, for this model where it is given.
    """
    require_expressible(plan, STOCK, model, _gaps(plan, model))
    layer = plan.layers[0]
    arguments: dict[str, Argument] = {
        "per_device_train_batch_size": plan.micro_batch // plan.dp(layer),
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if plan.assumed.seq_length:
        arguments["max_seq_length"] = plan.assumed.seq_length
    if layer.tp > 1:
        arguments["tensor_parallel_degree"] = layer.tp
        if plan.assumed.sequence_parallel:
            arguments["sequence_parallel"] = True
    elif layer.degree > 1:
        arguments["sep_parallel_degree"] = layer.degree
    if plan.pipeline > 1:
        arguments["pipeline_parallel_degree"] = plan.pipeline
    if plan.chunks > 1:
        arguments["virtual_pp_degree"] = plan.chunks
    if stage := sharding_stage(plan):
        arguments |= {"sharding": f"stage{stage}", "sharding_parallel_degree": plan.dp(layer)}
    kept = [index for index, each in enumerate(plan.layers) if not each.recompute]
    if len(kept) < len(plan.layers):
        [how] = {each.recompute for each in plan.layers if each.recompute}
        arguments |= {"recompute": True, "recompute_granularity": GRANULARITY[how]}
        if kept:
            arguments["no_recompute_layers"] = kept
    if plan.assumed.mixed_precision is not Precision.FP32:
        arguments |= {str(plan.assumed.mixed_precision): True, "fp16_opt_level": "O2"}
    return arguments


def stock_notes(plan: Plan) -> list[str]:
    """Notes on a plan that stock PaddleNLP can express."""
    layer, notes = plan.layers[0], []
    if plan.pipeline > 1 and plan.dp(layer) > 1 and not sharding_stage(plan):
        notes.append(placement_note(STOCK))
    if layer.ulysses and layer.degree > 1:
        notes.append(
            "sep_parallel_degree of PaddleNLP 3.0.0b4 is wrong on Paddle 3: it hands the two lists of "
            "paddle.distributed.alltoall over in Paddle 2's order"
        )
    if any(each.recompute is Recompute.ATTENTION for each in plan.layers):
        notes.append(
            "core_attn of stock PaddleNLP keeps what attention puts out, and k and v once for each head of q; the "
            "plan keeps neither, so that the memory predicted for it is less"
        )
    return notes


def as_flags(arguments: dict[str, Argument]) -> list[str]:
    """Each argument as it stands on a command line."""
    return [f"--{name} {_words(value)}" for name, value in arguments.items()]


def _words(value: Argument) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gaps(plan: Plan, model: ModelShape | None) -> Iterator[str]:
    """Further features that stock PaddleNLP and its model of this family lack."""
    layer, count = plan.layers[0], plan.micro_batches
    hows = dict.fromkeys(each.recompute for each in plan.layers if each.recompute)
    if len(hows) > 1:
        yield (
            f"recompute_enc: {STOCK} has one granularity for all layers that recompute, the plan has "
            f"{', '.join(how.words for how in hows)}"
        )
    for how in [how for how in hows if how not in GRANULARITY]:
        yield f"recompute_enc: {STOCK} recomputes attention (core_attn) or all of a layer, the plan has {how.words}"
    if plan.chunks > 1 and (count % plan.pipeline or count < 2 * plan.pipeline):
        yield (
            f"virtual_pp_deg: {STOCK} interleaves as the plan does where micro-batches are a multiple of the "
            f"{plan.pipeline} stages, and twice as many at least; the plan has {count}"
        )
    if layer.ulysses and layer.degree > 1 and sharding_stage(plan):
        yield (
            f"use_sp: {STOCK} shards over the {plan.dp(layer)} data-parallel ranks alone, "
            f"the plan over all {sharing(plan, layer)} ranks of a stage"
        )
    if model:
        yield from _gaps_of_model(plan, model)


def _gaps_of_model(plan: Plan, model: ModelShape) -> Iterator[str]:
    layer, traits = plan.layers[0], model.traits
    who = f"{STOCK}'s {traits.title}"
    if not traits.stock:
        yield f"model: {STOCK} has no {traits.title}"
    if layer.tp > 1 and not traits.stock_shares_kv_heads and model.kv_heads % layer.tp:
        yield f"tp_sizes_enc: {who} does not share {model.kv_heads} kv heads among {layer.tp} ranks"
    if layer.ulysses and layer.degree > 1:
        if not traits.stock_ulysses:
            yield f"use_sp: {who} has no sep_parallel_degree"
        elif model.kv_heads % layer.degree:
            yield f"use_sp: {STOCK} does not share {model.kv_heads} kv heads among {layer.degree} ranks"
    if not traits.stock_recomputes_some and plan.pipeline > 1 and len({each.recompute for each in plan.layers}) > 1:
        yield f"checkpoint: {who} in a pipeline recomputes all layers or none"
