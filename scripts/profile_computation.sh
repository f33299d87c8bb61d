#!/bin/sh
# Times a model's layers and its vocabulary layers; writes configs/computation_profiling_*.json.
# Each variable can be set from the environment, and further options given behind the script's name win.
# `None` leaves an option alone. All options: galvatron profile computation --help, docs/en/profile.md.
set -eu

# Launch: on several nodes this is started on each, with its NODE_RANK.
LAUNCH_ARGS="
    --num_nodes ${NUM_NODES:-1}
    --num_gpus_per_node ${NUM_GPUS_PER_NODE:-1}
    --master_addr ${MASTER_ADDR:-None}
    --master_port ${MASTER_PORT:-None}
    --node_rank ${NODE_RANK:-0}
    --hostfile ${HOSTFILE:-None}"

# The model: a preset or config.json; with set_model_config_manually 1 the numbers below it.
MODEL_ARGS=${MODEL_ARGS:-"
    --model_size ${MODEL_SIZE:-llama2-7b}
    --set_model_config_manually ${SET_MODEL_CONFIG_MANUALLY:-0}
    --vocab_size ${VOCAB_SIZE:-None}
    --hidden_size ${HIDDEN_SIZE:-None}
    --num_attention_heads ${NUM_ATTENTION_HEADS:-None}
    --seq_length ${SEQ_LENGTH:-2048}"}

# What is varied: profile_mode static, batch or sequence.
MODEL_PROFILER_ARGS=${MODEL_PROFILER_ARGS:-"
    --output ${OUTPUT:-configs}
    --profile_mode ${PROFILE_MODE:-batch}
    --profile_batch_size ${PROFILE_BATCH_SIZE:-1}
    --profile_min_batch_size ${PROFILE_MIN_BATCH_SIZE:-1}
    --profile_max_batch_size ${PROFILE_MAX_BATCH_SIZE:-8}
    --profile_batch_size_step ${PROFILE_BATCH_SIZE_STEP:-1}
    --profile_seq_length_list ${PROFILE_SEQ_LENGTH_LIST:-None}
    --profile_min_seq_length ${PROFILE_MIN_SEQ_LENGTH:-512}
    --profile_max_seq_length ${PROFILE_MAX_SEQ_LENGTH:-2048}
    --profile_seq_length_step ${PROFILE_SEQ_LENGTH_STEP:-512}
    --layernum_min ${LAYERNUM_MIN:-1}
    --layernum_max ${LAYERNUM_MAX:-3}
    --max_tp_deg ${MAX_TP_DEG:-8}
    --mixed_precision ${MIXED_PRECISION:-None}
    --analytic ${ANALYTIC:-None}"}

# shellcheck disable=SC2086 - the variables hold several words
exec "${GALVATRON:-galvatron}" profile computation $LAUNCH_ARGS $MODEL_ARGS $MODEL_PROFILER_ARGS "$@"
