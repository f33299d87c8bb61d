#!/bin/sh
# Trains a model by a plan: `galvatron train` with its most used options as variables.
# Each variable can be set from the environment, and further options given behind the script's name win. A block that is
# set as a whole (PARALLEL_ARGS="--pp_deg 2 …"), here or in the environment, stands for all of its lines.
# `None` leaves an option alone. All options: galvatron train --help, docs/en/train.md.
set -euf

# PARALLEL_ARGS. JSON mode: GALVATRON_CONFIG_PATH names a plan. GLOBAL mode: it is None and some of the others are set.
# Neither: the newest plan in configs/ that fits is taken.
[ -n "${PARALLEL_ARGS:-}" ] || set -- \
    --galvatron_config_path "${GALVATRON_CONFIG_PATH:-None}" \
    --global_train_batch_size "${GLOBAL_TRAIN_BATCH_SIZE:-None}" \
    --pp_deg "${PP_DEG:-None}" \
    --global_tp_deg "${GLOBAL_TP_DEG:-None}" \
    --global_tp_consec "${GLOBAL_TP_CONSEC:-None}" \
    --sdp "${SDP:-None}" \
    --chunks "${CHUNKS:-None}" \
    --global_checkpoint "${GLOBAL_CHECKPOINT:-None}" \
    --pipeline_type "${PIPELINE_TYPE:-None}" \
    --default_dp_type "${DEFAULT_DP_TYPE:-None}" \
    --vocab_tp "${VOCAB_TP:-None}" \
    --use_ulysses "${USE_ULYSSES:-None}" \
    --sequence-parallel "${SEQUENCE_PARALLEL:-None}" \
    --no_async_grad_reduce "${NO_ASYNC_GRAD_REDUCE:-None}" \
    --mixed_precision "${MIXED_PRECISION:-None}" \
    --use-flash-attn "${USE_FLASH_ATTN:-None}" \
    "$@"
# shellcheck disable=SC2086 - it holds several words
set -- ${PARALLEL_ARGS:-} "$@"

# CKPT_ARGS.
[ -n "${CKPT_ARGS:-}" ] || set -- \
    --save "${SAVE:-output}" \
    --save-interval "${SAVE_INTERVAL:-500}" \
    --load "${LOAD:-None}" \
    --load_iteration "${LOAD_ITERATION:-None}" \
    --load_distributed "${LOAD_DISTRIBUTED:-None}" \
    "$@"
# shellcheck disable=SC2086
set -- ${CKPT_ARGS:-} "$@"

# DATA_ARGS. Megatron data without .bin/.idx, a folder, "0.7 a 0.3 b", or random: random tokens.
[ -n "${DATA_ARGS:-}" ] || set -- --data_path "${DATA_PATH:-None}" --split "${SPLIT:-949,50,1}" "$@"
# shellcheck disable=SC2086
set -- ${DATA_ARGS:-} "$@"

# TRAIN_ARGS.
[ -n "${TRAIN_ARGS:-}" ] || set -- \
    --train_iters "${TRAIN_ITERS:-1000}" \
    --lr "${LR:-1e-4}" \
    --min_lr "${MIN_LR:-1e-5}" \
    --lr_decay_style "${LR_DECAY_STYLE:-cosine}" \
    --lr_warmup_fraction "${LR_WARMUP_FRACTION:-0.01}" \
    --adam_weight_decay "${ADAM_WEIGHT_DECAY:-0.01}" \
    --clip_grad "${CLIP_GRAD:-1.0}" \
    --seed "${SEED:-42}" \
    --eval_interval "${EVAL_INTERVAL:-None}" \
    --eval_iters "${EVAL_ITERS:-None}" \
    --log_interval "${LOG_INTERVAL:-10}" \
    "$@"
# shellcheck disable=SC2086
set -- ${TRAIN_ARGS:-} "$@"

# MODEL_ARGS.
[ -n "${MODEL_ARGS:-}" ] || set -- \
    --model_size "${MODEL_SIZE:-llama2-7b}" \
    --seq_length "${SEQ_LENGTH:-None}" \
    --set_model_config_manually "${SET_MODEL_CONFIG_MANUALLY:-None}" \
    --set_layernum_manually "${SET_LAYERNUM_MANUALLY:-None}" \
    --set_seqlen_manually "${SET_SEQLEN_MANUALLY:-None}" \
    "$@"
# shellcheck disable=SC2086
set -- ${MODEL_ARGS:-} "$@"

# On several nodes this script is started on each, with its NODE_RANK.
exec "${GALVATRON:-galvatron}" train \
    --num_nodes "${NUM_NODES:-None}" --nproc "${NUM_GPUS_PER_NODE:-8}" --node_rank "${NODE_RANK:-None}" \
    --master_addr "${MASTER_ADDR:-None}" --master_port "${MASTER_PORT:-None}" \
    "$@"
