#!/bin/sh
# Trains by the newest plan in configs/ that fits, as search_dist.sh writes it, or by the one that is named.
# Each variable can be set from the environment, and further options given behind the script's name win. A block that is
# set as a whole (TRAIN_ARGS="--max_steps 25 …"), here or in the environment, stands for all of its lines.
# `None` leaves an option alone. All options: docs/en/train.md.
set -euf

# PaddleNLP's scripts also have blocks that are empty here.
# shellcheck disable=SC2086 - they hold several words
set -- ${CONFIG_ARGS:-} ${DEFAULT_OPTIMIZER_ARGS:-} ${RUNTIME_PROFILE_ARGS:-} ${GRANULARITY_RUNTIME_ARGS:-} "$@"

# PARALLEL_ARGS.
[ -n "${PARALLEL_ARGS:-}" ] || set -- --galvatron_config_path "${GALVATRON_CONFIG_PATH:-None}" "$@"
# shellcheck disable=SC2086
set -- ${PARALLEL_ARGS:-} "$@"

# CKPT_ARGS.
[ -n "${CKPT_ARGS:-}" ] || set -- --output_dir "${OUTPUT_DIR:-output}" --save_steps "${SAVE_STEPS:-500}" "$@"
# shellcheck disable=SC2086
set -- ${CKPT_ARGS:-} "$@"

# DATA_ARGS. Megatron data without .bin/.idx, a folder, "0.7 a 0.3 b", or random: random tokens.
[ -n "${DATA_ARGS:-}" ] || set -- --input_dir "${DATA:-None}" "$@"
# shellcheck disable=SC2086
set -- ${DATA_ARGS:-} "$@"

# TRAIN_ARGS.
[ -n "${TRAIN_ARGS:-}" ] || set -- \
    --max_steps "${MAX_STEPS:-1000}" \
    --learning_rate "${LEARNING_RATE:-1e-4}" \
    --lr_scheduler_type "${LR_SCHEDULER_TYPE:-cosine}" \
    --warmup_ratio "${WARMUP_RATIO:-0.01}" \
    --weight_decay "${WEIGHT_DECAY:-0.01}" \
    --logging_steps "${LOGGING_STEPS:-10}" \
    "$@"
# shellcheck disable=SC2086
set -- ${TRAIN_ARGS:-} "$@"

# MODEL_ARGS. A preset, a config.json, or a folder with one.
[ -n "${MODEL_ARGS:-}" ] || set -- --model_name_or_path "${MODEL:-qwen2.5-0.5b}" "$@"
# shellcheck disable=SC2086
set -- ${MODEL_ARGS:-} "$@"

# On several nodes this script is started on each, with its NODE_RANK.
exec "${PYTHON:-python}" "$(dirname "$0")/run_pretrain_galvatron.py" \
    --num_nodes "${NUM_NODES:-None}" --nproc "${NUM_GPUS_PER_NODE:-8}" --node_rank "${NODE_RANK:-None}" \
    --master_addr "${MASTER_ADDR:-None}" --master_port "${MASTER_PORT:-None}" \
    "$@"
