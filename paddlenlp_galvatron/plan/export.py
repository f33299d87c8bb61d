"""A plan as arguments of other programs, which have one degree of each kind for the whole model.

PaddleNLP's `run_pretrain.py` (3.0.0b4): its Trainer refuses some combinations and chooses when to reduce gradients;
weights, gradients and optimizer states are placed as in the plan.

The YAML of PaddleFleet (release/0.4, September 2026), PaddleNLP's successor: it selects recomputed layers by lists, and
empty layers shorten its first and last stage. The older PaddleFormers 1.0.0 has the same names but neither feature.
Their Llama and Qwen2 have no Ulysses; Megatron-SP, the pipeline and ZeRO are as in stock PaddleNLP.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ..base.errors import UserError
from ..model import ModelShape, Recompute
from .check import adapters_of, searched_options
from .fleet_layers import MODULES, MTP, offload_settings, recompute_settings, stage_settings
from .precision import Precision
from .schedule import Schedule
from .strategy import DataParallel, LayerStrategy, Plan, all_sharing

STOCK = "stock PaddleNLP"
# Its `recompute_granularity`, one for all layers that recompute. Unlike ours, `core_attn` keeps the core's output.
GRANULARITY = {Recompute.FULL: "full", Recompute.ATTENTION: "core_attn"}
FLEET, FORMERS = "PaddleFleet", "PaddleFormers"
PROGRAMS = {"paddlenlp": STOCK, "paddlefleet": FLEET, "paddleformers": FORMERS}  # keyed by names of --trainer
PIN = "release/0.4"  # PaddleFleet's release
Argument = Any  # a value in a file: word, number, list or object


def stock_arguments(plan: Plan, model: ModelShape | None = None) -> dict[str, Argument]:
    """Arguments with which stock PaddleNLP trains by the plan, without those at PaddleNLP's default.

    Raises UserError with one line for each field that it cannot express, for this model if given.
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
        sharding = layer.shards(plan.stage_size)  # PaddleNLP derives data_parallel_degree from the other ranks
        arguments |= {"sharding": f"stage{stage}", "sharding_parallel_degree": sharding}
    kept = [index for index, each in enumerate(plan.layers) if not each.recompute]
    if len(kept) < len(plan.layers):
        [how] = {each.recompute for each in plan.layers if each.recompute}
        arguments |= {"recompute": True, "recompute_granularity": GRANULARITY[how]}
        if kept:
            arguments["no_recompute_layers"] = kept
    if plan.assumed.mixed_precision.mixed:
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
    """Each argument as on a command line."""
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
    """Arguments for the YAML file of `paddlefleet-cli train` or `paddleformers-cli train`, without model and data.

    Raises UserError with one line for each field that it cannot express, for this model if given.
    """
    _require_expressible(plan, program, model)
    layer, stage = plan.layers[0], sharding_stage(plan)
    arguments: dict[str, Argument] = {
        **_task_arguments(plan),
        "per_device_train_batch_size": plan.micro_batch // plan.dp(layer),
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if plan.assumed.seq_length:
        arguments["max_seq_len"] = plan.assumed.seq_length
    mtp = model.mtp_layers if model else 0
    stages = stage_settings(plan, mtp) or {}
    arguments |= {
        "tensor_model_parallel_size": layer.tp,
        **(stages if program == FLEET else {"pipeline_model_parallel_size": plan.pipeline}),
        "sequence_parallel": layer.tp > 1 and plan.assumed.sequence_parallel,
        "sharding": f"stage{stage}" if stage else "",  # its default is stage1
    }
    if stage:
        arguments["sharding_parallel_size"] = layer.shards(plan.stage_size)
    arguments |= recompute_settings(plan, stages, mtp) or {}
    if program == FLEET:
        arguments |= (offload_settings(plan, stages, mtp) or {}) | _only_in_fleet(plan, model)
    precision = plan.assumed.mixed_precision
    arguments |= {"bf16": precision is Precision.BF16, "fp16": precision is Precision.FP16}
    if precision.mixed:
        arguments["fp16_opt_level"] = "O2"
    return arguments


def _task_arguments(plan: Plan) -> dict[str, Argument]:
    """Arguments of the task that the plan was searched for; PaddleFleet's default fine-tunes adapters."""
    searched = searched_options(plan)
    task, rank = searched.get("task"), adapters_of(plan)
    stage = {"sft": "SFT", "lora": "SFT", "dpo": "DPO"}.get(str(task), "PT")
    return {"stage": stage} | (
        {"fine_tuning": "full"} if rank is None else {"fine_tuning": "lora"} | ({"lora_rank": rank} if rank else {})
    )


def _only_in_fleet(plan: Plan, model: ModelShape | None) -> dict[str, Argument]:
    """Arguments that PaddleFormers lacks, or for models that it lacks."""
    arguments: dict[str, Argument] = {"hybrid_parallel_topo_order": "pp_first"}  # ranks as in the plan
    if plan.layers[0].context > 1:
        arguments["context_parallel_size"] = plan.layers[0].context
    if (ep := max(each.ep for each in plan.layers)) > 1:
        arguments |= {"use_expert_parallel": True, "expert_model_parallel_size": ep}
    if model and model.traits.mixture and model.traits.mixture.bias:
        arguments[MTP] = model.mtp_layers  # config.json may ask for MTP, which the plan lacks
        if model.mtp_layers and plan.pipeline > 1:  # the last stage looks tokens up itself
            arguments["enable_mtp_magic_send"] = True
    if plan.assumed.flash_attention is not None:
        arguments["_attn_implementation"] = "flashmask" if plan.assumed.flash_attention else "eager"
    if plan.assumed.offload_optimizer:
        arguments["tensorwise_offload_optimizer"] = True
    if sharding_stage(plan) == 1:  # PaddleFleet's stage 1 shards evenly, as the plan's ZeRO
        master = plan.assumed.fp32_gradients is not False
        arguments |= {"amp_master_grad": master, "split_param": master}
    return arguments


def fleet_notes(plan: Plan, program: str = FLEET) -> list[str]:
    """Notes on a plan that the program can express."""
    layer, notes = plan.layers[0], []
    if plan.pipeline > 1 and plan.dp(layer) > 1 and (program != FLEET or layer.sharding or not sharding_stage(plan)):
        notes.append(placement_note(program))
    if any(each.recompute in MODULES for each in plan.layers) and plan.stages[0] < max(plan.stages):
        notes.append(
            f"layers are numbered without the empty layers in front, as {PIN} does; older copies of {program} "
            "count these in dense models"
        )
    return notes


def _fleet_gaps(plan: Plan, model: ModelShape | None, program: str) -> Iterator[str]:
    """Further features that the program and its model lack."""
    layer, fleet, mtp = plan.layers[0], program == FLEET, model.mtp_layers if model else 0
    stages = stage_settings(plan, mtp)
    kinds = dict.fromkeys(each.recompute for each in plan.layers if each.recompute)
    if layer.ulysses and layer.degree > 1:
        yield f"use_sp: {program}'s Llama and Qwen2 have no Ulysses"
    if partly := [kind.words for kind in kinds if kind is not Recompute.FULL and not (fleet and kind in MODULES)]:
        yield f"recompute_enc: {', '.join(partly)} is not written for {program}"
    elif Recompute.FULL in kinds and len(kinds) > 1:
        yield f"recompute_enc: {program} recomputes layers or parts of layers, not both in one model"
    elif stages is not None and recompute_settings(plan, stages, mtp) is None:
        unit = "chunk, where no empty layer is in front" if fleet else "stage"
        yield f"checkpoint: {program} recomputes the first layers of each {unit}, as many in each"
    if model and model.kv_heads % layer.tp:
        yield f"tp_sizes_enc: {program} does not share {model.kv_heads} kv heads among {layer.tp} ranks"
    if not fleet:
        if plan.chunks > 1:
            yield f"virtual_pp_deg: {plan.chunks} chunks a stage are not written for {program}"
        return
    if stages is None:
        shown = ",".join(map(str, plan.stages))
        yield f"pp_division: {program} can shorten the first and the last part alone, the plan has {shown}"
    count = plan.micro_batches
    if plan.chunks > 1 and (plan.pipeline == 2 or count % plan.pipeline or count < 2 * plan.pipeline):
        yield (
            f"virtual_pp_deg: {program} interleaves chunks as the plan does in more than 2 stages, where micro-batches "
            f"are a multiple of the stages, and twice as many at least; the plan has {plan.pipeline} stages and {count}"
        )
    if layer.context > 1 and (not sharding_stage(plan) or layer.sharding or any(each.ep > 1 for each in plan.layers)):
        yield f"cp_sizes_enc: {program} has cp where all ranks with the same weights shard them, and without ep"
    yield from _fleet_gaps_of_experts(plan, model)


def _fleet_gaps_of_experts(plan: Plan, model: ModelShape | None) -> Iterator[str]:
    size, tp = plan.stage_size, plan.layers[0].tp
    has = [model.of(at).experts > 0 for at in range(model.layers)] if model else [True] * len(plan.layers)
    layers = [layer for layer, experts in zip(plan.layers, has, strict=False) if experts]
    if not layers or all(layer.experts.ranks == 1 and not model for layer in layers):
        return
    degrees = dict.fromkeys(layer.ep for layer in layers)
    if len(degrees) > 1:
        remedy = "" if model else "; give --model if layers are dense"
        yield f"ep_sizes_enc: {FLEET} has one for all layers, the plan has {', '.join(map(str, degrees))}{remedy}"
        return
    (ep,) = degrees
    if any(layer.etp > 1 for layer in layers):
        yield f"tp_of_ep_sizes_enc: {FLEET} does not split an expert"
    if ep > 1 and ep % tp:
        yield f"ep_sizes_enc: {FLEET} wants a multiple of tp, which is {tp}; the plan has {ep}"
    if ep > 1 and sharing(plan, plan.layers[0]) > 1 and (not sharding_stage(plan) or plan.layers[0].sharding):
        yield f"dp_types_enc: {FLEET} has ep with sharding over all ranks alone, stage1 in a pipeline"
    if all_sharing(size, ep) > 1 and any(layer.experts_dp_type or layer.experts_sharding for layer in layers):
        yield f"dp_types_of_ep_enc: {FLEET} shards experts as other weights, over all ranks that have the same"


def sharing(plan: Plan, layer: LayerStrategy) -> int:
    """Ranks that hold a layer's states together, or equally."""
    return plan.stage_size // layer.tp


def _dp_type(plan: Plan, layer: LayerStrategy) -> DataParallel:
    return layer.dp_type if sharing(plan, layer) > 1 else DataParallel.DDP


def sharding_stage(plan: Plan, layer: LayerStrategy | None = None) -> int:
    """The sharding stage of Paddle that equals the plan's for a layer, by default the first; 0: none.

    Stage 1 keeps whole gradients, like zero2 with gradients summed over micro-batches.
    """
    summed = plan.assumed.async_grad_reduce and plan.micro_batches > 1
    stages = {DataParallel.DDP: 0, DataParallel.ZERO2: 1 if summed else 2, DataParallel.ZERO3: 3}
    return stages[_dp_type(plan, layer or plan.layers[0])]


def gaps(plan: Plan, program: str, model: ModelShape | None = None) -> list[str]:
    """A line for each field of a plan that `program` cannot express, for this model if given."""
    of_program = _stock_gaps(plan, model) if program == STOCK else _fleet_gaps(plan, model, program)
    missing = [*_uneven(plan, program), *_unlike(plan, program), *of_program]
    if plan.assumed.products:
        missing.append(f"assumed.products: {plan.assumed.products} is not written for {program}; plan without it")
    tp = plan.layers[0].tp
    experts = any(layer.experts.ranks > 1 or layer.experts_dp_type or layer.experts_sharding for layer in plan.layers)
    if experts and program != FLEET:
        missing.append(f"ep_sizes_enc: experts are not written for {program}")
    if model and (lacking := untaught(model.kinds)):
        missing.append(f"model: {lacking} are not written for {program}")
    if plan.vocab.pieces > 1:
        missing.append(f"loss_pieces: {program} computes the logits of all tokens at once, which takes more memory")
    fleet, mtp = program == FLEET, model.mtp_layers if model else 0
    offloads = fleet and offload_settings(plan, stage_settings(plan, mtp) or {}, mtp)
    if any(layer.offload for layer in plan.layers) and not offloads:
        can = "all of the input of layers that recompute all" if fleet else "no activations"
        missing.append(f"offload_enc: {program} keeps {can} in the host's memory")
    full = [layer.recompute is Recompute.FULL for layer in plan.layers]
    if mtp and (not fleet or (any(full) and not all(full))):
        where = " with some layers that recompute as a whole" * fleet
        missing.append(f"{MTP}: MTP{where} is not written for {program}; plan with --{MTP} 0")
    if model and model.vocab_size % tp:
        missing.append(f"vtp: {program} does not split a vocabulary of {model.vocab_size} over {tp} ranks nor pad it")
    return missing


def untaught(kinds: Sequence[ModelShape]) -> str:
    """Features of a model that is planned only, with alternating layer types; "": none."""
    return max((kind.lacking for kind in kinds), key=len)


def _require_expressible(plan: Plan, program: str, model: ModelShape | None) -> None:
    """Raise UserError with the gaps and the remedy."""
    if missing := gaps(plan, program, model):
        name = program.removeprefix("stock ").lower()
        raise UserError(
            f"{gap}; run it with galvatron train, or find another: galvatron search --trainer {name}" for gap in missing
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
    """Gaps of fields in which layers, vocabulary or stages differ, which `program` cannot express."""
    parts = (*plan.layers, plan.vocab.as_layer())
    for axis, degrees in {axis: {dict(each.extra)[axis] for each in parts} for axis, _ in plan.vocab.extra}.items():
        if degrees != {1} and (program != FLEET or len(degrees) > 1):
            yield f"{axis}_sizes_enc: {program} has {'one for all' if program == FLEET else 'none but 1'}"
    for field, of_vocab, values in (
        ("tp_sizes_enc", "vtp", [str(strategy.degree) for strategy in parts]),
        ("use_sp", "vsp", ["1" if strategy.ulysses and strategy.degree > 1 else "0" for strategy in parts]),
        ("dp_types_enc", "embed_sdp", [_dp_type(plan, strategy).value for strategy in parts]),
        ("sharding_sizes_enc", "vsharding", [str(strategy.sharding or "all ranks") for strategy in parts]),
    ):
        *layers, vocab = values
        if len(set(layers)) > 1:
            yield f"{field}: {program} has one for all layers, the plan has {', '.join(dict.fromkeys(layers))}"
        elif vocab != layers[0]:
            yield f"{of_vocab}: {program} has one for embedding, LM head and layers, the plan {vocab} and {layers[0]}"
    if len(set(plan.stages)) > 1 and program != FLEET:
        shown = ",".join(map(str, plan.stages))
        yield f"pp_division: {program} gives every stage as many layers, the plan {shown}"
