"""Options of other programs that have nothing to do here: the values each may have, and why no others.

Scripts of others run as they are: an option that names the fixed behaviour is taken, one that asks for another way to
the same numbers is taken and named in a note, and one that asks for an absent feature is refused with the reason.

One table a program. An option that two programs have with one meaning is in the table of the first; one with two
meanings is in none: it is an option of the command, which honours its own meaning alone (`recompute_granularity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Fate(NamedTuple):
    """The fate of one option."""

    why: str  # it has no effect, or takes no other value
    values: str | None = None  # at which it is taken, one of several apart by |; None: for any value
    holds: bool = True  # at these values, in every run; False: where the plan or the model says so, hence a note


Fates = dict[str, Fate]


def _only(values: str, why: str, *names: str, holds: bool = True) -> Fates:
    """Options that are taken at these values and refused at others."""
    return dict.fromkeys(names, Fate(why, values, holds))


def _idle(why: str, *names: str) -> Fates:
    """Options that have no effect at any value; a note names them."""
    return dict.fromkeys(names, Fate(why))


NO_GENERATION = "nothing is generated; evaluation gives the loss of the dev split"
NOT_QUANTISED = "weights are not quantised"
NO_MPI = "ranks are started without MPI; outputs of nccl-tests: galvatron profile import-nccl-tests"
TOKENS = "data are tokenised before: galvatron data prepare"
FUSED = "the same numbers by Paddle's plain kernels"
ALWAYS_FUSED = "PaddleNLP's layers always use Paddle's fused one"
ONE_BY_ONE = "weights stay apart, as checkpoints, ZeRO and Ulysses have them: the same numbers by a product more"
OVERLAP = "the runtime always overlaps them"
LOGGED = "every step's time and memory are in train_log.jsonl"
LOADER = "data are mapped files, read by each rank"
EVALUATED = "evaluation takes the training's global batches"
PADDED = "rows have the plan's length"
TWO_SIZES = "a layer's time and memory are the difference of models with 1 and 3 layers"
EXPERTS = "the model's config.json says what experts it has"
CONFIG = "the model's config.json says it"
NOT_FP8 = "products are of 16 or 32 bits: FP8 is not trained"
SAMPLES = "training is counted in steps: divide by the global batch"
TRANSPORT = "messages go through Paddle: NCCL on GPUs, gloo on CPUs"
GALVATRON = {  # 1.x to 2.4, and its PaddleNLP port
    **_only("0", "the search needs no head start; give min_bsz", "recommend_min_bsz"),
    **_only("1", "every pipeline is simulated", "use_pipeline_costmodel"),
    **_only("1", "predicted times are not scaled; profile again if they are off", "costmodel_coe"),
    **_only("linear", "time_profile_mode decides how times grow with the batch", "computation_mode", holds=False),
    **_only("together", "layers are measured whole", "profile_granularity"),
    **_only("all", "layers are measured whole", "profile_unit"),
    **_only("all", "measurements are kept; galvatron profile all --fresh forgets it", "profile_flow_control"),
    **_only(
        "0",
        "vocabulary layers split the sequence where their neighbours do; disable_sp",
        "disable_embedding_lmhead_sp",
    ),
    **_only(
        "1|-1",
        "vocabulary layers share tokens as the others do: global_cp_deg; a plan's file says others",
        "vocab_cp",
        holds=False,
    ),
    **_only("0", EXPERTS, "is_moe_model", holds=False),
    **_only("0", EXPERTS, "set_experts_manually"),
    **_only("0", "experts are sharded by ZeRO: dp_types_of_ep_enc of a plan's file", "use_fsep"),
    **_only("", "there is no other launcher that it could go to; leave it out", "extra_args_str"),
    **_only("0", "name the weights to begin with: galvatron train --load", "load_params"),
    **_only("0", "checkpoints need a folder that all nodes share", "no_shared_storage"),
    **_only("0", "use galvatron parity", "check_loss"),
    **_only("0", "use galvatron profile computation", "profile_forward", "profile_forward_only"),
    **_only("0", "use galvatron profile memory", "save_profiled_memory"),
    **_idle(
        "Llama and Qwen have no hidden dropout; theirs is attention_dropout in config.json",
        *("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    **_idle("weights are always made in the slices that a rank holds", "initialize_on_meta"),
    **_idle("the layers are PaddleNLP's own, in their order", "shape_order"),
    **_idle("it is of models like BERT", "max_predictions_per_seq"),
    **_idle("the loss is always computed in fp32", "entropy_in_fp32"),
    **_idle("Paddle's own setting holds", "allow_tf32"),
    **_idle("the plan says whether layers differ", "granularity_type"),
    **_idle("the cost model has no such term", "zero_with_slight_noise"),
    **_idle("collectives are priced by measurements", "estimate_tp_time_type"),
    **_idle("parts are measured without data parallelism", "profile_dp_type"),
    **_idle("the batch is profile_batch_size", "max_per_device_train_batch_size"),
    **_idle("the command says it: profile computation, profile memory", "profile_type"),
    **_idle("the slowest rank's time counts", "avg_or_min_or_first"),
    **_idle("the overlapped computation takes as long as its messages", "overlap_time_multiply"),
    **_idle(TWO_SIZES, "layernum_min", "layernum_max"),
    **_idle(TRANSPORT, "backend"),
    **_idle(NO_MPI, "mpi_path", "nccl_test_dir", "ascend_dir"),
    **_idle(LOGGED, "profile", "profile_time_flag", "profile_memory_flag", "save_time_flag", "save_memory_flag"),
    **_idle("a run ends at max_steps", "exit_after_profiling"),
    **_idle("a search takes one thread for about a second", "parallel_search", "worker"),
    **_idle("each rank is given its own", "local_rank"),
    **_idle("each rank takes a GPU of its own", "gpu_id"),
}
# Numbers of a model that Megatron-LM's scripts give -> field of ModelShape, or of its latents; training compares both.
SETTLED = {
    "rotary_base": "rope_theta",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "num_experts": "experts",
    "moe_router_topk": "experts_per_token",
    "moe_ffn_hidden_size": "expert_size",
    "moe_shared_expert_intermediate_size": "shared_size",
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
}
MEGATRON = {
    **_idle(CONFIG, *SETTLED),
    **_only("1", "a layer's MLP is gated by SiLU", "swiglu"),
    **_only("RMSNorm", "norms are RMSNorm", "normalization"),
    **_only("rope", "positions are rotary", "position_embedding_type"),
    **_only("1", "positions are rotary", "no_position_embedding"),
    **_only("0", "scales of norms begin at 1", "apply_layernorm_1p"),
    **_only("0", "layers have no hidden dropout", "hidden_dropout"),
    **_only("1", CONFIG, "disable_bias_linear", "untie_embeddings_and_output_weights", holds=False),
    **_only("1.0", CONFIG, "rotary_percent"),
    **_only("aux_loss|seq_aux_loss|none", "config.json says it", "moe_router_load_balancing_type", holds=False),
    **_only("0", "checkpoints are whole", "no_save_optim"),
    **_only(
        "", "its unit is another one: router_aux_loss_coef is layers / experts a token times it", "moe_aux_loss_coeff"
    ),
    **_only("", NOT_FP8, "fp8_format", "fp8_recipe"),
    **_only("", SAMPLES + ": train_iters", "train_samples"),
    **_only("", SAMPLES + ": lr_decay_iters", "lr_decay_samples"),
    **_only("", SAMPLES + ": lr_warmup_iters", "lr_warmup_samples"),
    **_only("", "all weights have one learning rate", "decoupled_lr", "decoupled_min_lr"),
    **_only("0", "gradients are summed in fp32, unless amp_master_grad is 0", "grad_reduce_in_bf16"),
    **_only("", "random tokens: data_path random", "mock_data"),
    **_idle(
        CONFIG, "multi_latent_attention", "qk_layernorm", "add_qkv_bias", "moe_layer_freq", "rotary_scaling_factor"
    ),
    **_idle(CONFIG, "moe_router_score_function", "moe_router_group_topk", "moe_router_num_groups", "mscale"),
    **_idle(CONFIG, "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "mscale_all_dim"),
    **_idle("the runtime's own dispatch", "moe_shared_expert_overlap", "moe_router_dtype", "moe_router_pre_softmax"),
    **_idle(NOT_FP8, "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather", "fp8_margin", "fp8_interval"),
    **_idle("the layers are PaddleNLP's own", "use_mcore_models", "use_legacy_models", "transformer_impl"),
    **_idle("the model's own, fused where the device has it", "attention_backend"),
    **_idle(FUSED, "no_masked_softmax_fusion", "moe_grouped_gemm", "moe_permute_fusion", "masked_softmax_fusion"),
    **_idle(FUSED, "no_rope_fusion", "cross_entropy_fusion_impl"),
    **_idle("the runtime's own dispatch", "moe_token_dispatcher_type"),
    **_idle(OVERLAP, "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_communication", "tp_comm_overlap"),
    **_idle("a step's loss is the mean of its tokens", "calculate_per_token_loss"),
    **_idle(
        "the allocator and Python's collector are left alone",
        "manual_gc",
        "manual_gc_interval",
        "empty_unused_memory_level",
    ),
    **_idle(
        "checkpoints load under every plan",
        "ckpt_format",
        "dist_ckpt_format",
        "dist_ckpt_strictness",
        "auto_detect_ckpt_format",
    ),
    **_idle("a run continues with its optimizer and its random numbers", "no_load_optim", "no_load_rng"),
    **_idle(
        "report_to and output_dir say where", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir"
    ),
    **_only(
        "uniform", "one strategy recomputes every layer; a plan's file says which", "recompute_method", holds=False
    ),
    **_only("1", "each layer is recomputed by itself; a plan's file says which", "recompute_num_layers", holds=False),
    **_idle(TOKENS, "tiktoken_pattern", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
    **_idle(LOADER, "num_workers", "data_impl", "data_cache", "skip_warmup", "no_mmap_bin_files"),
    **_idle(LOADER, "no_create_attention_mask_in_dataloader", "data_cache_path"),
    **_idle("a run ends at max_steps", "exit_duration_in_mins", "exit_interval"),
    **_idle(LOGGED, "log_throughput", "timing_log_level", "profile_step_start", "profile_step_end", "profile_ranks"),
    **_idle(
        LOGGED, "log_timers_to_tensorboard", "log_memory_to_tensorboard", "log_num_zeros_in_grad", "log_params_norm"
    ),
    **_idle(LOGGED, "log_validation_ppl_to_tensorboard"),
    **_idle("on_nonfinite says what a step without a finite loss does", "no_check_for_nan_in_loss_and_grad"),
    **_idle("the number of kv heads says it", "group_query_attention"),
    **_idle("a checkpoint says its own model and step", "use_checkpoint_args"),
    **_idle(TRANSPORT, "distributed_backend"),
    # Those of Pai-Megatron-Patch's Qwen scripts, too.
    **_only("1", "positions are rotary", "use_rotary_position_embeddings"),
    **_only("1", "say it in the model's config.json: rope_scaling", "rotary_seq_len_interpolation_factor"),
    **_only("MMAP", "prepare .bin and .idx, or fine-tune: task, dataset_name_or_path", "dataset"),
    **_only("pretrain", "say task sft, and dataset_name_or_path", "train_mode"),
    **_only("", "fine-tuning reads a folder: dataset_name_or_path", "train_data_path", "valid_data_path"),
    **_only("0", "every token of a row is learnt, by its place in the row", "eod_mask_loss", "reset_position_ids"),
    **_only("0", "a plan file's recompute_enc names parts; flash attention keeps no scores", "recompute_activations"),
    **_only("", "a plan file's recompute_enc names parts", "recompute_modules"),
    **_only("0", "activations stay on the device", "cpu_offloading", "cpu_offloading_num_layers"),
    **_only("0", "optimizer states stay on the device", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    **_only("", "optimizer states stay on the device", "optimizer_offload_policy"),
    **_only("0", "moments and masters are fp32", "use_precision_aware_optimizer"),
    **_only(
        "",
        "a plan file's pp_division gives the layers of each stage",
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ),
    **_only("", "every step has the same global batch", "rampup_batch_size"),
    **_idle("each pass over the data has an order of its own", "dataloader_type"),
    **_idle(PADDED, "max_padding_length"),
    **_idle(CONFIG, "extra_vocab_size"),
    **_idle(TOKENS, "patch_tokenizer_type"),
    **_idle(LOGGED, "tensorboard_queue_size"),
    **_idle(FUSED, "apply_query_key_layer_scaling", "te_rng_tracker", "external_cuda_graph", "cuda_graph_scope"),
}
PADDLENLP = {
    **_only("O2", "16-bit training keeps fp32 masters of 16-bit weights, which is O2", "fp16_opt_level"),
    **_only("1", "it trains; to evaluate alone: galvatron train --do_eval --max_steps N", "do_train"),
    **_only("0", "export with galvatron convert g2h", "do_export"),
    **_only("0", "use galvatron search", "autotuner_benchmark"),
    **_only("0", "its masks would differ from plan to plan", "lora_dropout"),
    **_only("0", NO_GENERATION, "eval_with_do_generation", "do_ceval"),
    **_only("0", "models are folders; copy them by hand", "from_aistudio", "save_to_aistudio"),
    **_only("0", NOT_QUANTISED, "load_quant_model", "do_qat", "do_ptq", "do_gptq", "do_awq", "ir_qlora"),
    **_only("", NOT_QUANTISED, "weight_quantize_algo"),
    **_only(
        "0",
        "fine-tuning trains all weights, or LoRA's adapters",
        *("prefix_tuning", "vera", "lokr", "reft", "pissa", "loraga", "use_mora", "lora_use_mixer", "dislora"),
    ),
    **_only("", "all projections of the decoder layers have adapters", "target_modules"),
    **_only("-1|0", "the reference is the model that the run begins with", "ref_model_update_steps"),
    **_only(
        "0",
        "every step's tokens/s are in train_log.jsonl; to try a few steps: galvatron train --max_steps",
        "benchmark",
    ),
    **_only("0", "its noise would differ from plan to plan", "neftune"),
    **_only(
        "0",
        "attention is the model's own",
        *("use_ssa", "use_shift_sparse_attention", "use_pose_convert", "use_long_sequence_strategies"),
    ),
    **_only("1", "say it in the model's config.json: rope_scaling", "rope_scaling_factor"),
    **_only("", "built-in data sets are not loaded; name a folder: dataset_name_or_path", "task_name"),
    **_only(
        "",
        "reward models, embeddings and reinforcement learning are not trained; task: sft, lora or dpo",
        *("train_datasets", "eval_datasets", "regularization", "normalizer_type", "normalizer_momentum"),
        *("normalize_score_during_training", "max_query_len", "max_passage_len", "group_size"),
        *("actor_model_name_or_path", "reward_model_name_or_path", "rl_algorithm"),
    ),
    **_only("0", "tokens go where the router sends them", "using_fake_gate"),
    **_only("0", "optimizer states stay on the device", "offload_optim", "tensorwise_offload_optimizer"),
    **_only("0", "checkpoints are whole", "ignore_save_lr_and_optim", "ignore_load_lr_and_optim"),
    **_only("0", "a run continues with the next samples", "ignore_data_skip"),
    **_only("", "the plan says which layers recompute", "no_recompute_layers"),
    **_only("0", "activations stay on the device", "offload_recompute_inputs"),
    **_only("32768", "fp16's first loss scale is fixed; it then adapts", "scale_loss"),
    **_idle("there is no prediction; do_eval evaluates", "do_predict"),
    **_idle(LOADER, "dataloader_num_workers", "distributed_dataloader", "share_folder", "lazy"),
    **_idle(LOGGED, "skip_profile_timer", "skip_memory_metrics"),
    **_idle("the bar shows on terminals only", "disable_tqdm"),
    **_idle(EVALUATED, "per_device_eval_batch_size", "eval_accumulation_steps"),
    **_idle(PADDED, "pad_to_multiple_of", "pad_to_max_length"),
    **_idle("packed rows are masked by it wherever flash attention runs", "flash_mask"),
    **_idle("the same numbers as without", "use_quick_lora"),
    **_idle("logits are never gathered", "tensor_parallel_output"),
    **_idle("nothing is generated", "save_generation_output"),
    **_idle("fields of a line that are not known are left alone", "remove_unused_columns"),
    **_idle("each step has a whole global batch", "dataloader_drop_last"),
    **_idle("gradients are freed in each step", "release_grads"),
    **_idle(
        "of a method that is off",  # and that is refused above
        *("vera_rank", "lokr_path", "lokr_dim", "prefix_path", "num_prefix_tokens", "neftune_noise_alpha"),
        *("dislora_rank", "dislora_dropout", "s_tsd", "ortho_lambda", "prefer_small_sigma", "ssa_group_size_ratio"),
        *("strategy_type", "strategy_name", "rope_scaling_type", "weight_blocksize", "weight_double_quant"),
        *("weight_double_quant_block_size", "hqlora_quantize_cfg", "lqlora_quantize_cfg", "lqlora_state_dict"),
        *("aistudio_repo_id", "aistudio_repo_private", "aistudio_repo_license", "aistudio_token"),
    ),
    **_idle("checkpoints are written during training", "use_async_save"),
    **_idle("expert_parallel_degree says it", "use_expert_parallel"),
    **_idle("the runtime's own dispatch", "using_flex_token", "moe_subbatch_token_num", "pre_alloc_memory"),
    **_idle("checkpoints load under every plan", "unified_checkpoint", "unified_checkpoint_config"),
    **_idle("recompute is the runtime's own", "recompute_use_reentrant"),
    **_idle("the plan says which layers recompute", "pp_recompute_interval"),
    **_idle("the plan says what is parallel", "enable_auto_parallel"),
    **_idle("layers run as PaddleNLP's dynamic graph", "to_static"),
    **_idle("compute_precision sets the type that layers compute in", "amp_custom_black_list", "amp_custom_white_list"),
    **_idle(ONE_BY_ONE, "fuse_attention_qkv", "fuse_attention_ffn"),
    **_idle(ALWAYS_FUSED, "use_fused_swiglu", "fuse_swiglu"),
    **_idle(
        FUSED,
        *("use_fast_layer_norm", "fused_linear_param_grad_add", "enable_linear_fused_grad_add", "use_fused_linear"),
        *("use_fused_linear_cross_entropy", "use_fused_head_and_loss_fn", "fused_linear", "use_fused_dropout_add"),
        *("use_sparse_head_and_loss_fn", "fuse_sequence_parallel_allreduce"),
    ),
    **_idle(
        OVERLAP,
        *("tensor_parallel_config", "pipeline_parallel_config", "sharding_parallel_config", "data_parallel_config"),
        "sequence_parallel_config",
    ),
}
PROGRAMS = {"Galvatron": GALVATRON, "Megatron-LM": MEGATRON, "PaddleNLP": PADDLENLP}
# Options of training, which other commands take and leave alone.
ELSEWHERE = _idle("training's alone", "use_fused_rms_norm", "use_fused_rope", "use_fused_cross_entropy")
FOREIGN: Fates = {name: fate for table in PROGRAMS.values() for name, fate in table.items()}
# Options above that may stand without a value, and those that take several words.
SWITCHES = {name for name, fate in FOREIGN.items() if fate.values in ("0", "1")}
SWITCHES -= {"costmodel_coe", "recompute_num_layers", "hidden_dropout"}
VALUED = {"timing_log_level", "profile_step_start", "profile_step_end", "profile_ranks", "cross_entropy_fusion_impl"}
VALUED |= {"tensorboard_queue_size", "cuda_graph_scope"}
SWITCHES -= {"rotary_seq_len_interpolation_factor", "cpu_offloading_num_layers", "optimizer_offload_fraction"}
SWITCHES |= {
    *("entropy_in_fp32", "unified_checkpoint", "skip_warmup", "share_folder", "disable_tqdm"),
    *("group_query_attention", "use_checkpoint_args", "do_predict", "exit_after_profiling", "mock_data"),
    *("use_mcore_models", "use_legacy_models", "fp8_param_gather", "calculate_per_token_loss", "manual_gc"),
    *("no_load_optim", "no_load_rng", "no_mmap_bin_files", "no_create_attention_mask_in_dataloader"),
    *("overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_communication", "tp_comm_overlap"),
    *("auto_detect_ckpt_format", "multi_latent_attention", "qk_layernorm", "add_qkv_bias", "moe_shared_expert_overlap"),
    *("moe_router_enable_expert_bias", "moe_router_pre_softmax", "no_check_for_nan_in_loss_and_grad"),
    *("parallel_search", "lazy", "pad_to_max_length", "flash_mask", "tensor_parallel_output", "save_generation_output"),
    *("use_quick_lora", "remove_unused_columns", "dataloader_drop_last", "release_grads", "use_async_save"),
    *("use_expert_parallel", "weight_double_quant", "aistudio_repo_private", "prefer_small_sigma", "using_flex_token"),
    *(
        name
        for name, fate in FOREIGN.items()
        if fate.why in (FUSED, ALWAYS_FUSED, ONE_BY_ONE, LOGGED) and name not in VALUED
    ),
    *ELSEWHERE,
}
SEVERAL = {name for name in FOREIGN if name.endswith("_config") or name.startswith("amp_custom")}
SEVERAL |= {"envs", "rampup_batch_size"}
# Program -> keys that its files alone have, at the top or in a section.
FILES = {
    "LLaMA-Factory": {
        *("finetuning_type", "cutoff_len", "lora_target", "template", "infer_backend", "export_dir"),
        *("model_class", "kernel_config", "dist_config", "peft_config"),  # 1.0's
    },
    "DeepSpeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
    "Accelerate": {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"},
    "PaddleFormers": {
        *("train_dataset_path", "train_dataset_type", "fine_tuning"),
        *("stage", "sharding_parallel_size", "_attn_implementation", "packing"),
    },
    "Axolotl": {"base_model", "sequence_len", "micro_batch_size"},
    "PaddleFleet": {"recompute_modules", "pp_layer_division", "trainer_type"},
}


def program_of(names: Iterable[str]) -> str:
    """The program whose file has these names, by two of its keys, or by an unmistakable one; empty: no known one."""
    given = set(names)
    held = {program: len(given & keys) for program, keys in FILES.items()}
    best = max(held, key=lambda program: held[program])
    return best if held[best] > 1 or given & {"finetuning_type", "zero_optimization", "compute_environment"} else ""


class Outcome(NamedTuple):
    """The outcome for an option without a use here; both are empty for a value that applies anyway."""

    fault: str = ""  # why it is refused
    idle: str = ""  # why it has no effect


def outcome_of(name: str, value: object, beside: Mapping[str, Fate] = {}) -> Outcome | None:
    """The outcome of an option by canonical name; None: it is no such option. `beside`: further options of one
    command."""
    fate = beside.get(name) or FOREIGN.get(name) or ELSEWHERE.get(name)
    if fate is None:
        return None
    if fate.values is None:
        return Outcome(idle=fate.why)
    if value in (None, "None"):
        return Outcome()
    if any(same(str(value), one) for one in fate.values.split("|")):
        return Outcome() if fate.holds else Outcome(idle=fate.why)
    return Outcome(fault=f"{value} is not supported: {fate.why}")


def idle_note(idle: Mapping[str, str]) -> str:
    """One line that names options without an effect, by reason; `idle`: option -> reason."""
    by_reason: dict[str, list[str]] = {}
    for given, reason in idle.items():
        by_reason.setdefault(reason, []).append(given)
    return "no effect here: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def same(value: str, other: str) -> bool:
    """Whether both say the same: numbers by value, booleans by any word for them, words in any case."""
    words = {"false": "0", "true": "1", "": "0"} if other in ("0", "1") else {}
    value = words.get(value.lower(), value.lower())
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other.lower()
