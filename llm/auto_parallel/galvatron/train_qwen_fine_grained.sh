#!/bin/sh
# Trains by the newest plan in configs/ that fits, as search_dist.sh writes it, or by the one that is named.
# Each variable can be set from the environment, and further options given behind the script's name win.
# `None` leaves an option alone. All options: docs/en/train.md.
set -eu

GALVATRON_CONFIG_PATH=${GALVATRON_CONFIG_PATH:-None}
MODEL=${MODEL:-qwen2.5-0.5b} # a preset, a config.json, or a folder with one
DATA=${DATA:-None}           # Megatron data without .bin/.idx, a folder, or "0.7 a 0.3 b"; None: random tokens
OUTPUT_DIR=${OUTPUT_DIR:-output}
NUM_NODES=${NUM_NODES:-1} # on several nodes this script is started on each, with its NODE_RANK
NUM_GPUS_PER_NODE=${NUM_GPUS_PER_NODE:-8}

exec "${PYTHON:-python}" "$(dirname "$0")/run_pretrain_galvatron.py" \
    --galvatron_config_path "$GALVATRON_CONFIG_PATH" \
    --model_name_or_path "$MODEL" \
    --input_dir "$DATA" \
    --output_dir "$OUTPUT_DIR" \
    --num_nodes "$NUM_NODES" --nproc "$NUM_GPUS_PER_NODE" --node_rank "${NODE_RANK:-0}" \
    --master_addr "${MASTER_ADDR:-None}" --master_port "${MASTER_PORT:-None}" \
    --max_steps "${MAX_STEPS:-1000}" \
    --learning_rate "${LEARNING_RATE:-1e-4}" \
    --lr_scheduler_type "${LR_SCHEDULER_TYPE:-cosine}" \
    --warmup_ratio "${WARMUP_RATIO:-0.01}" \
    --weight_decay "${WEIGHT_DECAY:-0.01}" \
    --save_steps "${SAVE_STEPS:-500}" \
    --logging_steps "${LOGGING_STEPS:-10}" \
    "$@"
