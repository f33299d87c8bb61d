#!/bin/sh
# Searches the best plan from profile files: `galvatron search` with its most used options as variables.
# Each variable can be set from the environment, and further options given behind the script's name win. A block that is
# set as a whole (SearchEngineArgs="--world_size 8 …"), here or in the environment, stands for all of its lines.
# `None` leaves an option alone. All options: galvatron search --help, docs/en/search.md.
set -euf

NUM_NODES=${NUM_NODES:-1}
NUM_GPUS_PER_NODE=${NUM_GPUS_PER_NODE:-8}
MEMORY=${MEMORY:-None} # GiB a device; None: all that the profiled GPU has
MODEL_SIZE=${MODEL_SIZE:-llama2-7b}
SEQLEN_LIST=${SEQLEN_LIST:-None} # instead of SEQ_LENGTH, a length a type of layers
SEQ_LENGTH=${SEQ_LENGTH:-$([ "$SEQLEN_LIST" = None ] && echo 2048 || echo None)}
PROFILES=${PROFILES:-configs} # folder of the profile files that have no path of their own below
BACKGROUND=${BACKGROUND:-0}   # 1: the search runs in the background, and its output goes to Search_*.log

# SearchEngineArgs. The search.
[ -n "${SearchEngineArgs:-}" ] || set -- \
    --num_nodes "$NUM_NODES" \
    --num_gpus_per_node "$NUM_GPUS_PER_NODE" \
    --memory_upper_limit "$MEMORY" \
    --min_bsz "${MIN_BSZ:-None}" \
    --max_bsz "${MAX_BSZ:-None}" \
    --bsz_scale "${BSZ_SCALE:-None}" \
    --settle_bsz "${SETTLE_BSZ:-None}" \
    --settle_chunk "${SETTLE_CHUNK:--1}" \
    --search_space "${SEARCH_SPACE:-full}" \
    --sp_space "${SP_SPACE:-None}" \
    --fine_grained_mode "${FINE_GRAINED_MODE:-1}" \
    --max_tp_size "${MAX_TP_SIZE:-8}" \
    --max_pp_size "${MAX_PP_SIZE:-None}" \
    --mixed_precision "${MIXED_PRECISION:-bf16}" \
    --sequence_parallel "${SEQUENCE_PARALLEL:-1}" \
    --output_config_path "${OUTPUT_CONFIG_PATH:-None}" \
    --log_dir "${LOG_DIR:-logs}" \
    "$@"
# shellcheck disable=SC2086 - it holds several words
set -- ${SearchEngineArgs:-} "$@"

# ProfileDataParserArgs. The profiles, and their model.
[ -n "${ProfileDataParserArgs:-}" ] || set -- \
    --profiles "$PROFILES" \
    --time_profile_mode "${TIME_PROFILE_MODE:-static}" \
    --memory_profile_mode "${MEMORY_PROFILE_MODE:-static}" \
    --profile_dialect "${PROFILE_DIALECT:-None}" \
    --model_size "$MODEL_SIZE" \
    --hidden_size_list "${HIDDEN_SIZE_LIST:-None}" \
    --layer_num_list "${LAYER_NUM_LIST:-None}" \
    --seqlen_list "$SEQLEN_LIST" \
    --seq_length "$SEQ_LENGTH" \
    --time_profiling_path "${TIME_PROFILING_PATH:-None}" \
    --memory_profiling_path "${MEMORY_PROFILING_PATH:-None}" \
    --allreduce_bandwidth_config_path "${ALLREDUCE_BANDWIDTH_CONFIG_PATH:-None}" \
    --p2p_bandwidth_config_path "${P2P_BANDWIDTH_CONFIG_PATH:-None}" \
    --overlap_coe_path "${OVERLAP_COE_PATH:-None}" \
    --sp_time_path "${SP_TIME_PATH:-None}" \
    "$@"
# shellcheck disable=SC2086
set -- ${ProfileDataParserArgs:-} "$@"

if [ "$BACKGROUND" = 1 ]; then
    log="Search_$(basename "$MODEL_SIZE")_${MEMORY}GB_${NUM_NODES}Nodes_${NUM_GPUS_PER_NODE}GPUs_per_node.log"
    nohup "${GALVATRON:-galvatron}" search "$@" >"$log" 2>&1 </dev/null &
    echo "Search in background: $log"
else
    exec "${GALVATRON:-galvatron}" search "$@"
fi
