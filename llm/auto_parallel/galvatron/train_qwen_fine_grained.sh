#!/bin/sh
# Trains a model by a searched plan: `galvatron train` with its most used options as variables.
# Each variable can be set from the environment, and further options given behind the script's name.
set -eu

GALVATRON_CONFIG_PATH=${GALVATRON_CONFIG_PATH:?name the plan: GALVATRON_CONFIG_PATH=configs/galvatron_config_....json}
MODEL=${MODEL:-qwen2.5-0.5b} # a config.json, its folder, or the name of a preset
OUTPUT_DIR=${OUTPUT_DIR:-output}
MAX_STEPS=${MAX_STEPS:-100}

set -- --model "$MODEL" --output_dir "$OUTPUT_DIR" --max_steps "$MAX_STEPS" "$@"
[ -z "${DATA:-}" ] || set -- --data "$DATA" "$@" # a Megatron data set without .bin and .idx; unset: random tokens
exec "${GALVATRON:-galvatron}" train "$GALVATRON_CONFIG_PATH" "$@"
