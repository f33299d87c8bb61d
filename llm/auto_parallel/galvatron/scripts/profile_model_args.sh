# Sourced by profile_computation.sh and profile_memory.sh, which say WHAT is measured and in which PROFILE_MODE: the
# search wants both of one model.
# Each variable can be set from the environment, and further options given behind a script's name win. A block that is
# set as a whole (MODEL_ARGS="--model_size …"), in a script or in the environment, stands for all of its lines.
# `None` leaves an option alone. All options: galvatron profile computation --help, docs/en/profile.md.

# MODEL_PROFILER_ARGS. The varied sizes.
[ -n "${MODEL_PROFILER_ARGS:-}" ] || set -- \
    --output "${OUTPUT:-configs}" \
    --profile_mode "$PROFILE_MODE" \
    --profile_batch_size "${PROFILE_BATCH_SIZE:-1}" \
    --profile_min_batch_size "${PROFILE_MIN_BATCH_SIZE:-1}" \
    --profile_max_batch_size "${PROFILE_MAX_BATCH_SIZE:-8}" \
    --profile_batch_size_step "${PROFILE_BATCH_SIZE_STEP:-1}" \
    --profile_seq_length_list "${PROFILE_SEQ_LENGTH_LIST:-None}" \
    --profile_min_seq_length "${PROFILE_MIN_SEQ_LENGTH:-512}" \
    --profile_max_seq_length "${PROFILE_MAX_SEQ_LENGTH:-2048}" \
    --profile_seq_length_step "${PROFILE_SEQ_LENGTH_STEP:-512}" \
    --profile_for "${PROFILE_FOR:-None}" \
    --max_tp_deg "${MAX_TP_DEG:-8}" \
    --mixed_precision "${MIXED_PRECISION:-bf16}" \
    --analytic "${ANALYTIC:-None}" \
    "$@"
# shellcheck disable=SC2086 - it holds several words
set -- ${MODEL_PROFILER_ARGS:-} "$@"

# MODEL_ARGS. A preset or config.json; with set_model_config_manually 1 the numbers below it.
[ -n "${MODEL_ARGS:-}" ] || set -- \
    --model_size "${MODEL_SIZE:-llama2-7b}" \
    --set_model_config_manually "${SET_MODEL_CONFIG_MANUALLY:-0}" \
    --vocab_size "${VOCAB_SIZE:-None}" \
    --hidden_size "${HIDDEN_SIZE:-None}" \
    --num_attention_heads "${NUM_ATTENTION_HEADS:-None}" \
    --seq_length "${SEQ_LENGTH:-2048}" \
    "$@"
# shellcheck disable=SC2086
set -- ${MODEL_ARGS:-} "$@"

# On several nodes this is started on each, with its NODE_RANK.
exec "${GALVATRON:-galvatron}" profile "$WHAT" \
    --num_nodes "${NUM_NODES:-None}" --num_gpus_per_node "${NUM_GPUS_PER_NODE:-None}" \
    --master_addr "${MASTER_ADDR:-None}" --master_port "${MASTER_PORT:-None}" \
    --node_rank "${NODE_RANK:-None}" --hostfile "${HOSTFILE:-${hostfile:-None}}" --launch "${launch:-None}" \
    "$@"
