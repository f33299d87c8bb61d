"""Names of options: Galvatron and its PaddleNLP port name the same things differently. One table for all commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..base.errors import UserError

# Other name -> our name.
ALIASES = {
    "memory_upper_limit": "memory_constraint",
    "max_tp_size": "max_tp_deg",
    "max_pp_size": "max_pp_deg",
    "bsz_step": "bsz_scale",
    "search_granularity": "fine_grained_mode",
    "disable_ulysses": "disable_sp",
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
    "accumulate_allreduce_grads_in_fp32": "amp_master_grad",
    "reduce_in_fp32": "amp_master_grad",
    "model": "model_size",
    "model_name_or_path": "model_size",
    "max_seq_length": "seq_length",
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
    "lr_warmup_fraction": "warmup_ratio",
    "adam_weight_decay": "weight_decay",
    "adam_eps": "adam_epsilon",
    "clip_grad": "max_grad_norm",
    "use_flash_attn": "use_flash_attention",
    "global_batch_size": "global_train_batch_size",
    "optimizer": "optim",
}
# Words that an option takes by its other name -> the value by our name.
WORDS = {"search_granularity": {"coarse-grained": "0", "fine-grained": "1"}}
BATCHES = "the plan says the global batch and how many micro-batches it has; leave it out"
DEGREES = "the plan says each layer's degrees; leave it out, or without a plan give pp_deg, global_tp_deg and sdp"
# Options with nothing to do here: the value at which they change nothing, and why there is no other.
ABSENT = {
    "recommend_min_bsz": ("0", "the search needs no head start; give min_bsz"),
    "use_pipeline_costmodel": ("1", "every pipeline is simulated"),
    "costmodel_coe": ("1", "predicted times are not scaled; profile again if they are off"),
    "profile_gpu_num": (None, "the name of the all-reduce file says which cluster was measured; leave it out"),
    "mpi_path": (None, "ranks are started without MPI; for nccl-tests use galvatron profile import-nccl-tests"),
    "nccl_test_dir": (None, "messages go through Paddle; for nccl-tests use galvatron profile import-nccl-tests"),
    "envs": (None, "ranks get the environment of the command; set the variables there"),
    "profile_type": (None, "computation and memory are commands of their own"),
    "profile_dp_type": (None, "parts are measured without data parallelism, so it changes nothing; leave it out"),
    "profile_unit": ("all", "layers are measured whole"),
    "shape_order": (None, "the layers are PaddleNLP's own, in their order; leave it out"),
    "make_vocab_size_divisible_by": (None, "the vocabulary is padded to a multiple of its degree; leave it out"),
    "extra_args_str": (None, "there is no other launcher that it could go to; leave it out"),
    "set_experts_manually": ("0", "models with experts are not supported"),
    "disable_cp": ("1", "context parallelism is not supported"),
    "virtual_pp_degree": ("1", "stages are not interleaved"),
    "gradient_accumulation_steps": (None, BATCHES),
    "per_device_train_batch_size": (None, BATCHES),
    "per_device_eval_batch_size": (None, "evaluation takes the training's global batches; leave it out"),
    "recompute": ("0", "the plan says which layers recompute; leave it out, or give global_checkpoint"),
    "recompute_granularity": ("full", "a layer recomputes whole or not at all"),
    "tensor_parallel_degree": ("-1", DEGREES),
    "pipeline_parallel_degree": ("-1", DEGREES),
    "sep_parallel_degree": ("-1", DEGREES),
    "context_parallel_degree": ("-1", "context parallelism is not supported"),
    "expert_parallel_degree": ("-1", "models with experts are not supported"),
    "sharding": ("", DEGREES),
    "sharding_degree": ("-1", DEGREES),
    "sharding_parallel_degree": ("-1", DEGREES),
    "data_parallel_degree": ("-1", DEGREES),
    "tensor_parallel_config": ("", "the runtime overlaps by itself; leave it out"),
    "pipeline_parallel_config": ("", "the runtime overlaps by itself; leave it out"),
    "sharding_parallel_config": ("", "the runtime overlaps by itself; leave it out"),
    "do_predict": ("0", "there is no prediction; evaluate with do_eval"),
    "do_export": ("0", "export with galvatron convert g2h"),
    "load_best_model_at_end": ("0", "checkpoints are kept by age"),
    "fuse_attention_qkv": ("0", "weights stay apart, as their shards are"),
    "fuse_attention_ffn": ("0", "weights stay apart, as their shards are"),
    "use_fused_rms_norm": ("0", "norms are Paddle's plain ones"),
    "use_fused_rope": ("0", "rotary embeddings are Paddle's plain ones"),
    "fp16_opt_level": ("O2", "16-bit training keeps fp32 masters of 16-bit weights, which is O2"),
    "check_loss": ("0", "use galvatron parity"),
    "profile": ("0", "use galvatron profile"),
    "dropout_prob": ("0", "dropout is attention_dropout in the model's config.json"),
    "num_experts": ("0", "models with experts are not supported"),
}
# Options that change nothing here, whatever their value: accepted, so that scripts of others run as they are.
IDLE = frozenset(
    {
        "do_train",
        "initialize_on_meta",  # weights are always made in the slices that a rank holds
        "overwrite_output_dir",  # a run goes on in its folder, or begins anew with resume_from_checkpoint none
        "tokenizer_name_or_path",  # data is tokenised before
        "data_impl",
        "skip_warmup",
        "share_folder",
        "data_cache",
        "dataloader_num_workers",
        "distributed_dataloader",
        "device",
        "disable_tqdm",
        "skip_memory_metrics",
        "skip_profile_timer",
        "unified_checkpoint",
        "distributed_checkpoint",
        "recompute_use_reentrant",
        "local_rank",
        "distributed_backend",
    }
)


def canonical_name(name: str) -> str:
    """Name of an option without dashes in front, with underscores, its alias resolved."""
    name = _plain(name)
    return ALIASES.get(name, name)


def canonical_value(name: str, value: str) -> str:
    """A value given under any name of an option, as it is given under the canonical name."""
    return WORDS.get(_plain(name), {}).get(value, value)


def is_absent(name: str, value: object) -> bool:
    """Whether an option has nothing to do here and may be left out. Raises UserError where its value asks for more."""
    plain = _plain(name)
    if plain in IDLE:
        return True
    if plain not in ABSENT:
        return False
    neutral, reason = ABSENT[plain]
    if str(value) != "None" and (neutral is None or str(value).lower() not in same_as(neutral)):
        raise UserError(f"{name}: {value} is not supported: {reason}")
    return True


def same_as(value: str) -> tuple[str, ...]:
    """The ways to write a value."""
    ways = {"0": ("0", "false", ""), "1": ("1", "true"), "-1": ("-1", "0", "1")}  # a degree of none is -1 in PaddleNLP
    return ways.get(value, (value.lower(),))


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The remedy for a misspelt name, which may have been meant as a known one or as an alias of one."""
    names = sorted(known)
    aliases = [alias for alias, name in ALIASES.items() if name in names]
    close = difflib.get_close_matches(_plain(given), [*names, *aliases], n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "known: " + ", ".join(prefix + name for name in names)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
