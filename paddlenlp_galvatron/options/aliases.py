"""Names of options: Galvatron and its PaddleNLP port name the same things differently. One table for all commands."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from typing import TypeVar

T = TypeVar("T")

# Other name -> our name.
ALIASES = {
    "memory_upper_limit": "memory_constraint",
    "max_tp_size": "max_tp_deg",
    "max_pp_size": "max_pp_deg",
    "bsz_step": "bsz_scale",
    "search_granularity": "fine_grained_mode",
    "disable_ulysses": "disable_sp",
    "disable_fsdp": "disable_sdp",
    "disable_embedding_lmhead_tp": "disable_vtp",
    "disable_tp_consec": "tp_consec",  # in Galvatron it switches off the search of strided groups
    "mixed_precision_type": "mixed_precision",
    "time_profile_data_path": "time_profiling_path",
    "memory_profile_data_path": "memory_profiling_path",
    "allreduce_coe_path": "allreduce_bandwidth_config_path",
    "p2p_coe_path": "p2p_bandwidth_config_path",
    "num_hidden_layers": "num_layers",
    "layernum": "num_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "layer_num_list": "layernum_list",
    "profile_fixed_seq_length_list": "profile_seq_length_list",
    "profile_fixed_batch_size": "profile_batch_size",
    "async_grad_reduce": "no_async_grad_reduce",
    "accumulate_allreduce_grads_in_fp32": "amp_master_grad",
    "reduce_in_fp32": "amp_master_grad",
    "model": "model_size",
    "model_name_or_path": "model_size",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "max_seq_len": "seq_length",
    "seq": "seq_length",
    "for": "trainer",
    "seq_len": "seq_length",
    "task_name_or_path": "dataset_name_or_path",
    "intokens": "zero_padding",
    "dpo_beta": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_label_smoothing": "label_smoothing",
    "data": "input_dir",
    "data_path": "input_dir",
    "train_iters": "max_steps",
    "epochs": "num_train_epochs",
    "save": "output_dir",
    "save_interval": "save_steps",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "eval_iters": "max_evaluate_steps",
    "lr": "learning_rate",
    "min_lr": "min_learning_rate",
    "lr_decay_style": "lr_scheduler_type",
    "lr_decay_iters": "decay_steps",
    "lr_warmup_iters": "warmup_steps",
    "use_distributed_optimizer": "sharding",
    "adam_weight_decay": "weight_decay",
    "adam_eps": "adam_epsilon",
    "clip_grad": "max_grad_norm",
    "use_flash_attn": "use_flash_attention",
    "use_fused_rotary_pos_emb": "use_fused_rope",
    "use_fused_rmsnorm": "use_fused_rms_norm",
    "cross_entropy_loss_fusion": "use_fused_cross_entropy",
    "global_batch_size": "global_train_batch_size",
    "gbs": "global_train_batch_size",
    "batch": "global_train_batch_size",
    "optimizer": "optim",
    "init_method_std": "initializer_range",
    "distributed_checkpoint": "load_distributed",
    "fine_grained_config_path": "galvatron_config_path",
    "usp_flag": "use_ulysses",
    "sharding_stage_level": "default_dp_type",
    "pipeline_schedule_mode": "pipeline_type",
    "sharding_degree": "sharding_parallel_degree",
    "tensor_model_parallel_size": "tensor_parallel_degree",
    "pipeline_model_parallel_size": "pipeline_parallel_degree",
    "expert_model_parallel_size": "expert_parallel_degree",
    "expert_tensor_parallel_degree": "global_tp_of_ep_deg",
    "expert_tensor_parallel_size": "global_tp_of_ep_deg",
    "context_parallel_degree": "global_cp_deg",
    "context_parallel_size": "global_cp_deg",
    "virtual_pp_degree": "virtual_pp_deg",
    "virtual_pipeline_model_parallel_size": "virtual_pp_deg",
    "num_virtual_stages_per_pipeline_rank": "virtual_pp_deg",
    "vpp": "virtual_pp_deg",
    "data_parallel_size": "data_parallel_degree",
    "accumulate_steps": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "mbs": "per_device_train_batch_size",
    "gradient_checkpointing": "recompute",
    "nnodes": "num_nodes",
    "nodes": "num_nodes",
    "gpus_per_node": "num_gpus_per_node",
}
# Name -> its meaning in a command without such an option, but with these, of which it is the first.
WHERE_ALONE = {
    "analytic": ("device", "profiles"),
    "gpus": ("world_size",),
    "world_size": ("gpus",),
    "global_train_batch_size": ("settle_bsz",),
    "output": ("output_config_path",),
    "bf16": ("mixed_precision",),
    "fp16": ("mixed_precision",),
    "tp": ("tensor_parallel_degree",),
    "pp": ("pipeline_parallel_degree",),
    "dp": ("data_parallel_degree",),
    "ep": ("expert_parallel_degree",),
    "cp": ("global_cp_deg",),
}
# Name of a value that a search chooses -> the option of `galvatron search` that limits it.
CHOSEN = {
    **dict.fromkeys(("tp", "global_tp_deg", "tensor_parallel_degree"), "max_tp_deg"),
    **dict.fromkeys(("pp", "pp_deg", "pipeline_parallel_degree"), "max_pp_deg"),
    **dict.fromkeys(("cp", "global_cp_deg"), "max_cp_deg"),
    **dict.fromkeys(("ep", "global_ep_deg", "expert_parallel_degree"), "max_ep_deg"),
    **dict.fromkeys(("dp", "data_parallel_degree"), "disable_dp"),
    **dict.fromkeys(("sharding", "sdp", "zero", "zero_stage", "sharding_parallel_degree"), "disable_sdp"),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "chunks"), "settle_chunk"),
    **dict.fromkeys(("recompute", "recompute_granularity", "global_checkpoint"), "disable_ckpt"),
    **dict.fromkeys(("use_ulysses", "sep_parallel_degree"), "sp_space"),
    **dict.fromkeys(("virtual_pp_deg", "num_layers_per_virtual_pipeline_stage"), "max_virtual_pp_deg"),
}
SEARCHED = {"settle_bsz", "max_cp_deg"}  # options that commands have which search
# A word that users try for an option, though it is no name of it -> the option, which is suggested.
MEANT = {
    **dict.fromkeys(("memory", "gpu_memory", "memory_gb", "max_memory", "budget"), "memory_constraint"),
    **dict.fromkeys(("max_tp", "tensor_parallel"), "max_tp_deg"),
    **dict.fromkeys(("max_pp", "pipeline_parallel"), "max_pp_deg"),
    "max_cp": "max_cp_deg",
    **dict.fromkeys(("dp_type", "zero_stage"), "default_dp_type"),
    "nproc_per_node": "num_gpus_per_node",
    **dict.fromkeys(("num_nodes", "num_gpus_per_node", "n_gpus", "num_gpus", "gpu_num"), "gpus"),
    **dict.fromkeys(("dtype", "precision"), "mixed_precision"),
    **dict.fromkeys(("gpu", "hardware", "sheet"), "device"),
    "micro_batches": "settle_chunk",
    **dict.fromkeys(("sp", "ulysses"), "sp_space"),
    "schedule": "pipeline_type",
    "out": "output",
}
# Words of others that an option takes under a name -> the value by our name.
STAGES = {"0": "ddp", "1": "zero2", "2": "zero2", "3": "zero3"}
TYPES = ("bf16", "fp16")  # of numbers, which others name by a switch each
WORDS = {
    **{name: {"1": name, "true": name, "0": "None", "false": "None"} for name in TYPES},
    "use_distributed_optimizer": {"1": "stage1", "true": "stage1", "0": "None", "false": "None"},
    "search_granularity": {"coarse-grained": "0", "fine-grained": "1"},
    "async_grad_reduce": {"0": "1", "1": "0", "false": "1", "true": "0"},
    "sharding_stage_level": STAGES,
    "pipeline_schedule_mode": {"1F1B": "pipedream_flush", "FThenB": "gpipe"},
    "model_type": dict.fromkeys(("llama_network", "llama_fine_grained", "llama_fine_grained_final"), "llama"),
    "lr_decay_style": {"constant": "constant_with_warmup"},  # Megatron-LM's has a warm-up
    "model_name_or_path": {"llama": "None"},  # PaddleNLP's Llama as the other options say it
}
MOST_LISTED = 20  # known names that an error lists
NEAR = 0.75  # likeness of two names, 0 to 1, below which one is no misspelling of the other: world_size, model_size
# Where both are given the second holds, for any order: Megatron-LM's scheduler sets it over the first.
BEATEN = {"adam_weight_decay": "weight_decay"}

# Names that Megatron-LM's scripts have, and our options whose default is another one there -> its name and default.
MEGATRON_NAMES = {"train_iters", "lr", "tensor_model_parallel_size", "pipeline_model_parallel_size", "lr_decay_style"}
MEGATRON_DEFAULTS = {
    "min_learning_rate": ("min_lr", "0"),
    "weight_decay": ("weight_decay", "0.01"),
    "seed": ("seed", "1234"),
    "split": ("split", "969,30,1"),
}


def other_defaults(given: Iterable[str], known: Container[str]) -> str:
    """A note for a script of Megatron-LM, by its plain names, on the defaults that it does not set; else ""."""
    if MEGATRON_NAMES.isdisjoint(given) or "lr_scheduler_type" not in known:
        return ""
    unset = [f"--{name} {to}" for ours, (name, to) in MEGATRON_DEFAULTS.items() if not ({ours, name} & {*given})]
    return f"Megatron-LM's defaults are others: {', '.join(unset)}; give them to be sure" if unset else ""


def canonical_name(name: str, known: Container[str] = ()) -> str:
    """Name of an option without dashes in front, with underscores, its alias resolved; `known`: those of a command."""
    name = plain_name(name)
    name = ALIASES.get(name, name)
    meant = WHERE_ALONE.get(name, ())
    return meant[0] if meant and name not in known and all(one in known for one in meant) else name


def other_names(name: str, known: Container[str] = ()) -> list[str]:
    """Other names of an option in a command with these options."""
    opposite = {other for other, words in WORDS.items() if words.get("0") == "1"}
    others = (other for other in (*ALIASES, *WHERE_ALONE) if other not in known and other not in opposite)
    return [other for other in others if canonical_name(other, known) == name]


def canonical_value(name: str, value: T, known: Container[str] = ()) -> T | str:
    """A value given under any name of an option, as it is given under the canonical name."""
    plain = plain_name(name)
    words = {} if plain in TYPES and canonical_name(plain, known) == plain else WORDS.get(plain, {})
    text = str(value)
    return words.get(text, words.get(text.lower(), value))


def unknown(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The fault of an option that a command lacks, and the remedy."""
    names = sorted(known)
    limit = CHOSEN.get(plain_name(given)) or CHOSEN.get(canonical_name(given, names))
    if limit and not SEARCHED.isdisjoint(names):
        where = f"{prefix}{limit}" if limit in names else f"{limit} of galvatron search"
        return f"the search chooses it; {where} limits it, and galvatron plan uniform writes a plan with it"
    return f"unknown option; {did_you_mean(given, names, prefix)}"


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The remedy for a misspelt name, which may have been meant as a known one or as an alias of one."""
    names = sorted(known)
    aliases = [other for name in names for other in other_names(name, names)]
    plain = plain_name(given)
    option = MEANT.get(plain) or MEANT.get(canonical_name(plain, names))
    meant = [option] if option in (*names, *aliases) else []
    near = difflib.get_close_matches(plain, [*names, *aliases], n=1, cutoff=NEAR)
    if close := dict.fromkeys([*meant, *near]):
        return f"did you mean {' or '.join(prefix + name for name in close)}?"
    if (prefix and names) or len(names) > MOST_LISTED:
        return "--help lists all"
    return "known: " + ", ".join(prefix + name for name in names)


def plain_name(name: str) -> str:
    """Name of an option without dashes in front, with underscores."""
    return name.lstrip("-").replace("-", "_")
