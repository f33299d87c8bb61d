"""A plan as arguments of other programs, which have one degree of each kind for the whole model.

PaddleNLP's own `run_pretrain.py` (3.0.0b4): its Trainer refuses some combinations. When gradients are reduced is its
own affair; where weights, gradients and optimizer states lie is as in the plan.

The YAML of PaddleFleet (September 2026), PaddleNLP's successor, and of the older PaddleFormers 1.0.0: both have the
same names. They recompute all layers, or the first layers of each stage, as many in each. Their Llama and Qwen2 have no
Ulysses; Megatron-SP, the pipeline and ZeRO are as stock PaddleNLP has them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base.errors import UserError
from ..model import ModelShape, Recompute
from .schedule import Schedule
from .strategy import DataParallel, LayerStrategy, Plan, Precision

STOCK = "stock PaddleNLP"
# Its `recompute_granularity`, one for all layers that recompute. Unlike ours, `core_attn` keeps the core's output.
GRANULARITY = {Recompute.FULL: "full", Recompute.ATTENTION: "core_attn"}
FLEET, FORMERS = "PaddleFleet", "PaddleFormers"
Argument = bool | int | str | list[int]


def stock_arguments(plan: Plan, model: ModelShape | None = None) -> dict[str, Argument]:
    """Arguments with which stock PaddleNLP trains as the plan says; those at PaddleNLP's default are left out.

    Raises UserError with one line for each field that it cannot express, for this model where it is given.
    """
    _require_expressible(plan, STOCK, model)
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
        sharding = layer.shards(plan.stage_size)  # it makes the rest of the ranks its data_parallel_degree
        arguments |= {"sharding": f"stage{stage}", "sharding_parallel_degree": sharding}
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
    if plan.pipeline > 1 and plan.dp(layer) > 1 and (not sharding_stage(plan) or layer.sharding):
        notes.append(placement_note(STOCK))
    if layer.ulysses and layer.degree > 1:
        notes.append(
            "sep_parallel_degree of PaddleNLP 3.0.0b4 is wrong on Paddle 3: it hands the two lists of "
            "paddle.distributed.alltoall over in Paddle 2's order"
        )
    if layer.sharding and sharding_stage(plan) > 1:
        notes.append("PaddleNLP's sharding stage2 and stage3 take no amp_master_grad with data parallelism")
    if any(each.recompute is Recompute.ATTENTION for each in plan.layers):
        notes.append(
            "core_attn of stock PaddleNLP keeps attention's output, and k and v once for each head of q; the "
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


def _stock_gaps(plan: Plan, model: ModelShape | None) -> Iterator[str]:
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
        yield from _stock_gaps_of_model(plan, model)


def _stock_gaps_of_model(plan: Plan, model: ModelShape) -> Iterator[str]:
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


def fleet_arguments(plan: Plan, model: ModelShape | None = None, program: str = FLEET) -> dict[str, Argument]:
    """Arguments for the YAML file of `paddlefleet-cli train` or `paddleformers-cli train`, besides model and data.

    Raises UserError with one line for each field that it cannot express, for this model where it is given.
    """
    _require_expressible(plan, program, model)
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
        arguments["sharding_parallel_size"] = layer.shards(plan.stage_size)
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


def _fleet_gaps(plan: Plan, model: ModelShape | None, program: str) -> Iterator[str]:
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


def sharing(plan: Plan, layer: LayerStrategy) -> int:
    """Ranks that hold a layer's states together, or equally."""
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


def gaps(plan: Plan, program: str, model: ModelShape | None = None) -> list[str]:
    """A line for each field of a plan that `program` cannot express, for this model where it is given."""
    own = _stock_gaps(plan, model) if program == STOCK else _fleet_gaps(plan, model, program)
    found = [*_uneven(plan, program), *_unlike(plan, program), *own]
    tp = plan.layers[0].tp
    if any(layer.experts.ranks > 1 or layer.experts_dp_type or layer.experts_sharding for layer in plan.layers):
        found.append(f"ep_sizes_enc: experts are not written for {program}")
    if plan.vocab.pieces > 1:
        found.append(f"loss_pieces: {program} computes the logits of all tokens at once, which takes more memory")
    if model and model.vocab_size % tp:
        found.append(f"vtp: {program} does not split a vocabulary of {model.vocab_size} over {tp} ranks nor pad it")
    return found


def _require_expressible(plan: Plan, program: str, model: ModelShape | None) -> None:
    """Raise UserError with the gaps, and the way out."""
    if found := gaps(plan, program, model):
        name = program.removeprefix("stock ").lower()
        raise UserError(
            f"{gap}; run it with galvatron train, or find another: galvatron search --trainer {name}" for gap in found
        )


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
        ("sharding_sizes_enc", "vsharding", [str(part.sharding or "all ranks") for part in parts]),
    ):
        *layers, vocab = values
        if len(set(layers)) > 1:
            yield f"{field}: {program} has one for all layers, the plan has {', '.join(dict.fromkeys(layers))}"
        elif vocab != layers[0]:
            yield f"{of_vocab}: {program} has one for embedding, LM head and layers, the plan {vocab} and {layers[0]}"
    if len(set(plan.stages)) > 1:
        shown = ",".join(map(str, plan.stages))
        yield f"pp_division: {program} gives every stage as many layers, the plan {shown}"
