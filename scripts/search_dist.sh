#!/bin/sh
# Searches the best plan from profile files: `galvatron search` with its most used options as variables.
# Each variable can be set from the environment, and further options given behind the script's name.
set -eu

NUM_NODES=${NUM_NODES:-1}
NUM_GPUS_PER_NODE=${NUM_GPUS_PER_NODE:-8}
MEMORY=${MEMORY:-24} # GB a device
MODEL_SIZE=${MODEL_SIZE:-llama2-7b}
SEQ_LENGTH=${SEQ_LENGTH:-2048}
PROFILES=${PROFILES:-configs} # folder of the profile files

ProfileDataParserArgs="--profiles $PROFILES
    --time_profile_mode ${TIME_PROFILE_MODE:-static}
    --memory_profile_mode ${MEMORY_PROFILE_MODE:-static}"
SearchEngineArgs="--num_nodes $NUM_NODES
    --num_gpus_per_node $NUM_GPUS_PER_NODE
    --memory_constraint $MEMORY
    --settle_bsz ${SETTLE_BSZ:-16}
    --seq_length $SEQ_LENGTH
    --sp_space ${SP_SPACE:-tp+sp}
    --mixed_precision ${MIXED_PRECISION:-bf16}"

# shellcheck disable=SC2086 - the variables hold several words
exec "${GALVATRON:-galvatron}" search --model_size "$MODEL_SIZE" --log_dir "${LOG_DIR:-logs}" \
    $ProfileDataParserArgs $SearchEngineArgs "$@"
