"""Options of Galvatron, Megatron-LM and PaddleNLP that have nothing to do here: what each may say, and why no more.

Scripts of others run as they are: an option that says what holds anyway is taken, one that asks for another way to the
same numbers is taken and named in a note, and one that asks for what is not there is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

EXPERTS = "the model's config.json says what experts it has"
NO_CONTEXT = "vocabulary layers share tokens as the others do: global_cp_deg; a plan's file says others"
NO_GENERATION = "nothing is generated; evaluation gives the loss of the dev split"
NOT_QUANTISED = "weights are not quantised"
# Says what holds anyway: the values at which it does, one of several apart by |, and why there is no other.
HOLDS = {
    "recommend_min_bsz": ("0", "the search needs no head start; give min_bsz"),
    "use_pipeline_costmodel": ("1", "every pipeline is simulated"),
    "costmodel_coe": ("1", "predicted times are not scaled; profile again if they are off"),
    "computation_mode": ("linear", "how times grow with the batch is what time_profile_mode says"),
    "profile_granularity": ("together", "layers are measured whole"),
    "profile_unit": ("all", "layers are measured whole"),
    "profile_flow_control": ("all", "what was measured is kept; galvatron profile all --fresh forgets it"),
    "disable_embedding_lmhead_sp": ("0", "vocabulary layers split the sequence where their neighbours do; disable_sp"),
    "vocab_cp": ("1|-1", NO_CONTEXT),
    "use_distributed_optimizer": ("0", "optimizer states are sharded by ZeRO-2: default_dp_type zero2"),
    "num_layers_per_virtual_pipeline_stage": ("", "say how many chunks a stage has: virtual_pp_deg"),
    **dict.fromkeys(("is_moe_model", "set_experts_manually", "num_experts"), ("0", EXPERTS)),
    "use_fsep": ("0", "experts are sharded by ZeRO: dp_types_of_ep_enc of a plan's file"),
    "recompute_granularity": ("full", "the plan says which parts a layer recomputes; search: recompute_parts"),
    "fp16_opt_level": ("O2", "16-bit training keeps fp32 masters of 16-bit weights, which is O2"),
    "extra_args_str": ("", "there is no other launcher that it could go to; leave it out"),
    "do_train": ("1", "it trains; to evaluate alone: galvatron train --do_eval --max_steps N"),
    "do_export": ("0", "export with galvatron convert g2h"),
    "load_params": ("0", "name the weights to begin with: galvatron train --load"),
    "no_shared_storage": ("0", "checkpoints need a folder that all nodes share"),
    "check_loss": ("0", "use galvatron parity"),
    "profile_forward": ("0", "use galvatron profile computation"),
    "save_profiled_memory": ("0", "use galvatron profile memory"),
    "autotuner_benchmark": ("0", "use galvatron search"),
    "lora_dropout": ("0", "its masks would differ from plan to plan"),
    "eval_with_do_generation": ("0", NO_GENERATION),
    "do_ceval": ("0", NO_GENERATION),
    **dict.fromkeys(("from_aistudio", "save_to_aistudio"), ("0", "models are folders; copy them by hand")),
    **dict.fromkeys(("load_quant_model", "do_qat", "do_ptq", "do_gptq", "do_awq"), ("0", NOT_QUANTISED)),
    "weight_quantize_algo": ("", NOT_QUANTISED),
    **dict.fromkeys(
        ("prefix_tuning", "vera", "lokr", "reft", "pissa", "loraga", "use_mora", "lora_use_mixer", "dislora"),
        ("0", "fine-tuning trains all weights, or LoRA's adapters"),
    ),
    "target_modules": ("", "adapters are beside all projections of the decoder layers"),
    "ir_qlora": ("0", NOT_QUANTISED),
    "ref_model_update_steps": ("-1|0", "the reference is the model that the run begins with"),
    "benchmark": ("0", "every step's tokens/s are in train_log.jsonl; to try a few steps: galvatron train --max_steps"),
    "bf16": ("1", "its times are those of bf16; others: galvatron search --mixed_precision"),
    "fp16": ("0", "its times are those of bf16; others: galvatron search --mixed_precision"),
    "neftune": ("0", "its noise would differ from plan to plan"),
    **dict.fromkeys(
        ("use_ssa", "use_shift_sparse_attention", "use_pose_convert", "use_long_sequence_strategies"),
        ("0", "attention is the model's own"),
    ),
    "rope_scaling_factor": ("1", "say it in the model's config.json: rope_scaling"),
    "task_name": ("", "built-in data sets are not loaded; name a folder: dataset_name_or_path"),
    **dict.fromkeys(
        (
            *("train_datasets", "eval_datasets", "regularization", "normalizer_type", "normalizer_momentum"),
            *("normalize_score_during_training", "max_query_len", "max_passage_len", "group_size"),
            *("actor_model_name_or_path", "reward_model_name_or_path", "rl_algorithm"),
        ),
        ("", "reward models, embeddings and reinforcement learning are not trained; task: sft, lora or dpo"),
    ),
    "using_fake_gate": ("0", "tokens go where the router sends them"),
    **dict.fromkeys(("offload_optim", "tensorwise_offload_optimizer"), ("0", "optimizer states stay on the device")),
    **dict.fromkeys(("ignore_save_lr_and_optim", "ignore_load_lr_and_optim"), ("0", "checkpoints are whole")),
    "ignore_data_skip": ("0", "a run goes on with the samples that come next"),
    "no_recompute_layers": ("", "the plan says which layers recompute"),
    "offload_recompute_inputs": ("0", "activations stay on the device"),
    "scale_loss": ("32768", "fp16's first loss scale is fixed; it falls and rises by itself"),
}
NO_MPI = "ranks are started without MPI; outputs of nccl-tests: galvatron profile import-nccl-tests"
TOKENS = "data are tokenised before: galvatron data prepare"
FUSED = "the same numbers by Paddle's plain kernels"
ALWAYS_FUSED = "PaddleNLP's layers always use Paddle's fused one"
ONE_BY_ONE = "weights stay apart, as checkpoints, ZeRO and Ulysses have them: the same numbers by a product more"
OF_TRAINING = "training's alone"
OVERLAP = "the runtime overlaps by itself"
LOGGED = "every step's time and memory are in train_log.jsonl"
DROPOUT = "Llama and Qwen have no hidden dropout; theirs is attention_dropout in config.json"
LOADER = "data are mapped files, read by each rank"
EVALUATED = "evaluation takes the training's global batches"
PADDED = "rows have the plan's length"
GENERATES = "nothing is generated"
# Settings of PaddleNLP's methods of fine-tuning that HOLDS refuses, and of quantisation.
SETTINGS = (
    *("vera_rank", "lokr_path", "lokr_dim", "prefix_path", "num_prefix_tokens", "neftune_noise_alpha"),
    *("dislora_rank", "dislora_dropout", "s_tsd", "ortho_lambda", "prefer_small_sigma", "ssa_group_size_ratio"),
    *("strategy_type", "strategy_name", "rope_scaling_type", "weight_blocksize", "weight_double_quant"),
    *("weight_double_quant_block_size", "hqlora_quantize_cfg", "lqlora_quantize_cfg", "lqlora_state_dict"),
    *("aistudio_repo_id", "aistudio_repo_private", "aistudio_repo_license", "aistudio_token"),
)
# Another way to the same numbers: why it has no effect here, whatever its value.
IDLE = {
    **dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"), DROPOUT),
    "do_predict": "there is no prediction; do_eval evaluates",
    "initialize_on_meta": "weights are always made in the slices that a rank holds",
    "shape_order": "the layers are PaddleNLP's own, in their order",
    "max_predictions_per_seq": "it is of models like BERT",
    "entropy_in_fp32": "the loss is always computed in fp32",
    "allow_tf32": "Paddle's own setting holds",
    "granularity_type": "the plan says whether layers differ",
    "zero_with_slight_noise": "the cost model has no such term",
    "estimate_tp_time_type": "collectives are priced by what was measured",
    "profile_dp_type": "parts are measured without data parallelism",
    "max_per_device_train_batch_size": "the batch is profile_batch_size",
    "profile_type": "the command says it: profile computation, profile memory",
    "avg_or_min_or_first": "the slowest rank's time counts",
    "overlap_time_multiply": "the computation beside messages takes as long as they do",
    "layernum_min": "a layer's time and memory are the difference of models with 1 and 3 layers",
    "layernum_max": "a layer's time and memory are the difference of models with 1 and 3 layers",
    "backend": "messages go through Paddle: NCCL on GPUs, gloo on CPUs",
    "mpi_path": NO_MPI,
    "nccl_test_dir": NO_MPI,
    "ascend_dir": NO_MPI,
    "tokenizer_type": TOKENS,
    "tokenizer_model": TOKENS,
    "vocab_file": TOKENS,
    "merge_file": TOKENS,
    "num_workers": LOADER,
    "dataloader_num_workers": LOADER,
    "distributed_dataloader": LOADER,
    "data_impl": LOADER,
    "data_cache": LOADER,
    "skip_warmup": LOADER,
    "share_folder": LOADER,
    "profile": LOGGED,
    "exit_after_profiling": LOGGED,
    "profile_time_flag": LOGGED,
    "profile_memory_flag": LOGGED,
    "profile_forward_only": LOGGED,
    "save_time_flag": LOGGED,
    "save_memory_flag": LOGGED,
    "skip_profile_timer": LOGGED,
    "skip_memory_metrics": LOGGED,
    "log_throughput": LOGGED,
    "timing_log_level": LOGGED,
    "group_query_attention": "the number of kv heads says it",
    "use_checkpoint_args": "a checkpoint says its own model and step",
    "disable_tqdm": "the bar shows on terminals only",
    "per_device_eval_batch_size": EVALUATED,
    "eval_accumulation_steps": EVALUATED,
    "lazy": LOADER,
    "pad_to_multiple_of": PADDED,
    "pad_to_max_length": PADDED,
    "flash_mask": "packed rows are masked by it wherever flash attention runs",
    "use_quick_lora": "the same numbers as without",
    "tensor_parallel_output": "logits are never gathered",
    "save_generation_output": GENERATES,
    "remove_unused_columns": "fields of a line that are not known are left alone",
    "dataloader_drop_last": "each step has a whole global batch",
    "release_grads": "gradients are freed in each step",
    **dict.fromkeys(SETTINGS, "of a method that is not asked for"),
    "use_async_save": "checkpoints are written beside training",
    "use_expert_parallel": "expert_parallel_degree says it",
    **dict.fromkeys(("using_flex_token", "moe_subbatch_token_num", "pre_alloc_memory"), "the runtime's own dispatch"),
    "unified_checkpoint": "checkpoints load under every plan",
    "recompute_use_reentrant": "recompute is the runtime's own",
    "pp_recompute_interval": "the plan says which layers recompute",
    "enable_auto_parallel": "the plan says what is parallel",
    "to_static": "layers run as PaddleNLP's dynamic graph",
    **dict.fromkeys(("parallel_search", "worker"), "a search takes one thread for about a second"),
    "local_rank": "each rank is told its own",
    "gpu_id": "each rank takes a GPU of its own",
    "distributed_backend": "NCCL on GPUs, gloo on CPUs",
    "amp_custom_black_list": "what layers compute in is compute_precision",
    "amp_custom_white_list": "what layers compute in is compute_precision",
    "fuse_attention_qkv": ONE_BY_ONE,
    "fuse_attention_ffn": ONE_BY_ONE,
    "use_fused_swiglu": ALWAYS_FUSED,
    "fuse_swiglu": ALWAYS_FUSED,
    "use_fast_layer_norm": FUSED,
    "fused_linear_param_grad_add": FUSED,
    "enable_linear_fused_grad_add": FUSED,
    "use_fused_linear_cross_entropy": FUSED,
    "use_fused_head_and_loss_fn": FUSED,
    "use_fused_linear": FUSED,
    "fused_linear": FUSED,
    "use_fused_dropout_add": FUSED,
    "use_sparse_head_and_loss_fn": FUSED,
    "fuse_sequence_parallel_allreduce": FUSED,
    "tensor_parallel_config": OVERLAP,
    "pipeline_parallel_config": OVERLAP,
    "sharding_parallel_config": OVERLAP,
    "data_parallel_config": OVERLAP,
    "sequence_parallel_config": OVERLAP,
    "unified_checkpoint_config": "checkpoints load under every plan",
}
# Options of training, which other commands take and leave alone.
ELSEWHERE = {"use_fused_rms_norm": OF_TRAINING, "use_fused_rope": OF_TRAINING, "use_fused_cross_entropy": OF_TRAINING}
# Options above that may stand without a value, and those that take several words.
SWITCHES = {name for name, (values, _) in HOLDS.items() if values in ("0", "1")} - {"costmodel_coe", "num_experts"} | {
    *("entropy_in_fp32", "unified_checkpoint", "skip_warmup", "share_folder", "disable_tqdm"),
    *("group_query_attention", "use_checkpoint_args", "do_predict"),
    *("parallel_search", "lazy", "pad_to_max_length", "flash_mask", "tensor_parallel_output", "save_generation_output"),
    *("use_quick_lora", "remove_unused_columns", "dataloader_drop_last", "release_grads", "use_async_save"),
    *("use_expert_parallel", "weight_double_quant", "aistudio_repo_private", "prefer_small_sigma", "using_flex_token"),
    *(
        name
        for name, why in IDLE.items()
        if why in (FUSED, ALWAYS_FUSED, ONE_BY_ONE, LOGGED) and name != "timing_log_level"
    ),
    *ELSEWHERE,
}
SEVERAL = {name for name in IDLE if name.endswith("_config") or name.startswith("amp_custom")} | {"envs"}


class Outcome(NamedTuple):
    """The outcome for an option without a use here; both are empty for one that says what holds anyway."""

    fault: str = ""  # why it is refused
    idle: str = ""  # why it has no effect


def outcome_of(name: str, value: object) -> Outcome | None:
    """By canonical name; None: it is no such option."""
    if idle := IDLE.get(name) or ELSEWHERE.get(name):
        return Outcome(idle=idle)
    if name not in HOLDS:
        return None
    values, reason = HOLDS[name]
    if value in (None, "None") or any(_same(str(value), one) for one in values.split("|")):
        return Outcome()
    return Outcome(fault=f"{value} is not supported: {reason}")


def idle_note(idle: Mapping[str, str]) -> str:
    """One line that names options without an effect, by reason; `idle`: option -> reason."""
    by_reason: dict[str, list[str]] = {}
    for given, reason in idle.items():
        by_reason.setdefault(reason, []).append(given)
    return "no effect here: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def _same(value: str, other: str) -> bool:
    """Whether both say the same: numbers by value, booleans by any word for them, words in any case."""
    words = {"false": "0", "true": "1", "": "0"} if other in ("0", "1") else {}
    value = words.get(value.lower(), value.lower())
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other.lower()
